"""The experts on a GPU, in Triton: three kernels forward and five backward.

Nothing of this package is compiled at installation, and none of its modules that import `triton` is
loaded before the backend first runs.

    backend.py          what the layer calls: (x_TD, plan, weights) -> y_TD, and whether it can
    operator.py         the two operators that torch sees, forward and backward
    launch.py           buffers, grids and arguments of the kernels
    hidden.py           x -> hidden units, with the activation in the epilogue
    hidden_gradient.py  dy -> the gradient before the activation, and of the routing weights
    product.py          rows times the matrix of their expert
    weight_gradient.py  the gradients of matrices and biases: sums over the rows of an expert
    combine.py          a token's weighted sum over its pairs
    tiles.py            which expert, rows and columns a program works on
    activation.py       the activations and their slopes
    configs.py          tile sizes to choose from
"""
