"""Transformer-XL on WikiText-2: does a mixture of small layers beat one small layer, and reach the large one?"""
