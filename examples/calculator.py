"""Let a model use a calculator: tool calls, their answers, and one packed sequence for it all.

    python examples/calculator.py

What stands in for the model is a script that knows when to reach for the tool, so that calls happen
without a model of billions of weights. A real engine takes its place in the line that says so; the
rest stays as it is.
"""

import ast
import asyncio
import operator
import re

import trajpack
from trajpack.agent import Prompt, RolloutRunner, SamplingParams
from trajpack.agent.agents.tool_agent import ToolAgent
from trajpack.agent.agents.tools import Tool
from trajpack.agent.environments.questions import ExactAnswerEnvironment, Question
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import GenerationOutput

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression):
    """Work out sums, differences, products and quotients of numbers; nothing is ever run as code.

    Raises:
        ValueError: If the text is anything else, or too long.
    """
    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")

    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(operand))
        raise ValueError("expected numbers, parentheses and + - * /")

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("that is no expression") from error


CALCULATOR = Tool(
    name="calculate",
    description="Works out an expression of numbers, parentheses and + - * /.",
    parameters={"properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    function=calculate,
)


class ScriptedEngine:
    """Says what a model would that reads of a tool; its first call has a mistake in it."""

    version = 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        pass

    async def generate(self, request):
        """Return the completion of a request."""
        qid, ids, _ = request
        said = self.tokenizer.encode(self.say(self.tokenizer.decode(ids)) + "<|im_end|>")
        return GenerationOutput(qid, ids, said, [-0.1] * len(said), False, 0, 0)

    def say(self, conversation):
        """Call the tool with what was asked, or give its answer."""
        answers = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", conversation)
        if answers and not answers[-1].startswith("error"):
            return answers[-1]
        (question,) = re.findall(r"What is (.*?)\?", conversation)
        (tool,) = re.findall(r'"name": "(\w+)"', conversation.partition("<|im_end|>")[0])
        key = "expression" if answers else "text"
        call = f'{{"name": "{tool}", "arguments": {{"{key}": "{question}"}}}}'
        return f"<tool_call>\n{call}\n</tool_call>"


async def main():
    """Roll two questions out and show what a trainer gets."""
    _, tokenizer = build_tiny_model()
    asked = {"product": ("17 * 23", "391"), "sum": ("(1.5 + 2) * 4 - 6", "8.0")}
    questions = [
        Question(name, ({"role": "user", "content": f"What is {text}?"},), (answer,))
        for name, (text, answer) in asked.items()
    ]
    agent = ToolAgent(SamplingParams(max_new_tokens=64), tokenizer, [CALCULATOR])
    prompts = [Prompt(question.id, agent.prompt_ids(question.messages)) for question in questions]
    trajectories = []
    async with ScriptedEngine(tokenizer) as engine:  # a TransformersEngine, an SGLangEngine, ...
        runner = RolloutRunner(engine, agent, ExactAnswerEnvironment(questions))
        async for result in runner.run(prompts):
            assert result.error is None, result.error
            trajectories += result.trajectories

    for trajectory in trajectories:
        last = trajectory.turns[-1]
        print(f"--- {trajectory.id}: rewards {[turn.reward for turn in trajectory.turns]}")
        print(tokenizer.decode([*last.prompt_ids, *last.completion_ids]))
    batch = trajpack.pack(trajectories)
    print(batch)
    sampled = [len(turn.completion_ids) for one in trajectories for turn in one.turns]
    print(
        f"{int(batch.loss_mask.sum())} tokens were sampled and are trained, in {sampled} by turn;"
    )
    print("what the tool said is in the sequences and is not trained")
    assert int(batch.loss_mask.sum()) == sum(sampled)
    assert [trajectory.turns[-1].reward for trajectory in trajectories] == [1.0, 1.0]
    assert len(batch.seqlens) == len(trajectories)


if __name__ == "__main__":
    asyncio.run(main())
