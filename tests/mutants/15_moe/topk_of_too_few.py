"""topk(capacity), which asks for more tokens than there are.

task: expert_choice
says: expert_choice raised RuntimeError
"""


def expert_choice(logits, capacity):
    probs = logits.float().softmax(1).t()
    tokens = probs.topk(capacity)[1]
    return (tokens, probs.gather(1, tokens))
