"""The papers' own numbers, to stand beside ours."""

from __future__ import annotations

#: Veličković et al. 2024, Table 1: accuracy in % by size, ten seeds.
SIZES = tuple(2**n for n in range(4, 15))
MAX_RETRIEVAL = {
    "baseline": (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4),
    "adaptive": (98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0),
}
#: Li et al. 2025 (vanishing variance), Table 1 and, for standardise, Table 3 added to it; 100 seeds.
ARGMAX = {
    ("baseline", "plain"): (99.6, 99.2, 98.4, 96.8, 93.7, 88.0, 78.0, 62.5, 44.2, 29.7, 20.8),
    ("layer_norm", "plain"): (99.6, 99.3, 98.6, 97.4, 94.8, 89.8, 81.0, 66.9, 49.2, 33.0, 22.6),
    ("baseline", "adaptive"): (99.6, 99.2, 98.5, 96.9, 94.1, 89.1, 81.2, 69.1, 54.2, 39.0, 27.1),
    ("layer_norm", "adaptive"): (99.7, 99.4, 98.7, 97.5, 95.1, 91.0, 84.0, 73.6, 58.9, 43.1, 30.4),
}
ARGMAX_GAIN = {
    "layer_norm": (0.01, 0.11, 0.21, 0.57, 1.15, 1.81, 2.98, 4.32, 4.99, 3.30, 1.76),
    "standardise": (-0.05, 0.0, 0.09, 0.26, 0.60, 0.84, 1.62, 2.26, 3.05, 1.80, 0.70),
}
#: The same, Table 2.
DICTIONARY = {
    ("baseline", "plain"): (99.3, 98.6, 97.3, 94.7, 89.5, 80.4, 67.6, 52.9, 38.7, 26.5, 17.8),
    ("layer_norm", "plain"): (99.4, 98.8, 97.6, 95.3, 90.7, 82.9, 71.7, 57.7, 44.1, 32.3, 22.4),
}
#: Anson et al. 2025, Tables 1 and 2: loss and needle accuracy at 1, 4 and 16 times the training length, three seeds.
LENGTHS = ("4k", "16k", "64k")
LENGTH = {
    "rope": (3.261, 3.936, 5.260),
    "prope": (3.260, 3.984, 5.735),
    "nope": (3.397, 6.430, 8.125),
    "rope_ntk": (3.261, 3.703, 5.430),
    "logn_rope": (3.260, 3.273, 3.378),
    "logn_prope": (3.256, 3.262, 3.317),
    "logn_ntk": (3.261, 3.272, 3.394),
    "alibi": (3.281, 3.272, 3.270),
    "scale_invariant_prope": (3.244, 3.235, 3.247),
}
NEEDLES = {
    "rope": (0.962, 0.000, 0.000),
    "prope": (0.966, 0.250, 0.000),
    "nope": (0.964, 0.303, 0.000),
    "rope_ntk": (0.962, 0.217, 0.000),
    "logn_rope": (0.965, 0.276, 0.064),
    "logn_prope": (0.969, 0.962, 0.939),
    "logn_ntk": (0.962, 0.253, 0.056),
    "alibi": (0.957, 0.020, 0.003),
    "scale_invariant_prope": (0.965, 0.969, 0.969),
}
#: Li et al. 2025 (information entropy invariance), Tables 2, 3 and 10, trained at 64: perplexity and accuracy by length.
MASKED_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
MASKED = {
    ("dot_product", "none"): ("2.17/.84", "2.55/.80", "3.05/.76", "17.12/.46", "327/.10", "> 500"),
    ("dot_product", "infoscale"): ("2.16/.84", "2.48/.81", "2.71/.78", "8.60/.58", "109/.23", "> 500"),
    ("dot_product", "softmax_plus"): ("2.57/.80", "2.85/.78", "3.05/.76", "11.02/.53", "145/.19", "> 500"),
    ("cosscale128", "none"): ("2.29/.82", "2.70/.78", "2.92/.77", "5.03/.68", "24.03/.43", "49.45/.32"),
    ("cosscale128", "infoscale"): ("2.28/.82", "2.64/.79", "2.86/.78", "5.03/.68", "23.24/.44", "44.07/.34"),
    ("cosscale128", "softmax_plus"): ("2.56/.78", "2.82/.77", "2.92/.77", "4.96/.68", "23.01/.44", "44.08/.34"),
}
