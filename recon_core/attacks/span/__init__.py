"""The span attack: training images from a dense first layer's weights, by independence.

Read `subspace` (the span, and how many images are in it), `features` (what is sparse about an
image), `orthogonal` and `likelihood` (the separation), `sources` (sign, label, trust), and
`attack`, which puts them together.
"""
