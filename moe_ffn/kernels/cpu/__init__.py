"""The experts on a CPU: one autograd function over the whole MLP, in blocks that stay in the cache.

What costs beside the products is memory: page faults on fresh buffers, passes over them, and calls.
So gathers, activations and weights go over one block of rows at a time, in buffers that are reused; the
results of a token's experts are added up by one `embedding_bag`; and of the forward pass only the first
product is kept, from which backward computes the rest again. docs/performance.md has the measurements.

    backend.py          what the layer calls: (x_TD, plan, weights) -> y_TD, and whether it can
    blocks.py           the plan's rows cut into blocks, and blocks into the rows of one expert
    rows.py             gathering tokens, and adding up what their experts made of them
    products.py         the matrix products of one weight, and its gradient
    activation.py       the hidden units of a block and their gradient, in place
    workspace.py        scratch buffers of one pass
    gradient_memory.py  memory of large gradients, kept from step to step
"""
