"""One token after the other, in Python.

task: positions
says: no loop over tokens
"""

import torch


def positions(experts, number, capacity):
    T, k = experts.shape
    flat = experts.t().reshape(-1)
    (flat[:, None] == torch.arange(number)).to(torch.int64)
    used, place = [0] * number, []
    for e in flat.tolist():
        place.append(used[e] if e >= 0 else -1)
        if e >= 0:
            used[e] += 1
    place = torch.tensor(place, dtype=torch.int64)
    place = torch.where((flat < 0) | (place >= capacity), -1, place)
    return place.view(k, T).t().contiguous()
