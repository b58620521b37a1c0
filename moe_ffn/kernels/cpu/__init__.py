"""The experts on a CPU: one autograd function over the whole MLP, in blocks that stay in the cache.

Beside the products, memory is what costs: page faults on fresh buffers, passes over them, and calls. So
gathers, activations and weights go over one block of rows at a time, in buffers that are reused; the
results of a token's experts are added up by one `embedding_bag`; and of the forward pass only the first
product is kept, from which backward computes the rest again. docs/performance.md has the measurements.

backend.py     the backend: (x_TD, plan, weights) -> y_TD, and whether it can
rows.py        the plan's rows cut into blocks; gathering tokens, and adding up their experts' results
products.py    the products of one weight and its gradient, and the memory they are written into
activation.py  the hidden units of a block and their gradient, in place
"""
