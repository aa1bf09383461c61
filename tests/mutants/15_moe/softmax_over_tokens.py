"""Each expert has a softmax of its own, over the tokens.

task: expert_choice
says: a softmax over the tokens
"""


def expert_choice(logits, capacity):
    probs = logits.float().softmax(0).t()
    tokens = probs.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    return (tokens, probs.gather(1, tokens))
