"""What a SageMaker training job is made of: pure functions that render it, rules that check it, calls that run it."""
