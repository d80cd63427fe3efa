"""Which mesh, will it fit, how fast, and why not the others: cluster and model in, plans out."""
