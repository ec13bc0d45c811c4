"""Log-probabilities of tokens from hidden states and the LM head, without ever holding all logits.

`token_logprobs` has the public ops, `logit_statistics` the pass over the vocabulary behind them.
"""
