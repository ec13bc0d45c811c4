"""One file per trainer: a packed batch in the form that the trainer takes, and back."""
