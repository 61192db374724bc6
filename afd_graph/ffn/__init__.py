"""The FFN side: the experts of each MoE layer as programs of their own, and what runs them."""
