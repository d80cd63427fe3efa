"""Which mesh, will it fit, how fast, and why not the others: a cluster and a model in, plans out."""
