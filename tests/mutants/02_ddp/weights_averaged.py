"""The weights are averaged, which are equal already, and not their gradients.

task: average_gradients
says: it is still this rank's own: nobody has put the mean there
"""


def average_gradients(group, params):
    for p in params:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([p.detach().reshape(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.data.copy_(piece.view_as(p))
