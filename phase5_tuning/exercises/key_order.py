"""Find the order of keys in which P needs no shuffle.

On a Hopper GPU four neighboring threads, t = 0 to 3, share the logits of a query. They hold them as the product S left
them, and the product P V wants e4m3 numbers as its left operand holds them:

    in S                 of each 8 keys    thread t holds 2t and 2t + 1
    as a left operand    of each 16 places thread t holds 4t to 4t + 3

A thread may name its own numbers as it likes, at no cost. It may let the logit of key 9 pass for place 3 of the
operand. Then all that is needed is that the value at place 3 is that of key 9. To give a number to another thread is a
shuffle, which costs instructions. Write

1. `value_order`, for values that are stored transposed, in an order of our own: which key's value stands at each place;
2. `row_order`, for values that stay in their order, where rows of K are stored in an order of our own instead: which
   key stands in each row of K. The product S has its column n from row n of K.

Several orders are right. keys is a multiple of 16.

Notebook: phase5_tuning/fp8.ipynb, section 4.2.
"""


def value_order(keys: int) -> list[int]:
    """The key whose value stands at each place, for 0, 1, ... keys - 1."""
    # your code: no number changes its thread
    raise NotImplementedError


def row_order(keys: int) -> list[int]:
    """The key that stands in each row of K, while values stand in their own order."""
    # your code: no number changes its thread
    raise NotImplementedError
