"""Search strategies, context swap, mixture weights and the estimators that make one update of all of them."""
