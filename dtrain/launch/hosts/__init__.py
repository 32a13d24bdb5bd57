"""Several hosts: their ranks meet before anything starts, differences are told, and a lost rank is named.

A part beside the core: `dtrain.launch` loads it by name where torchrun or srun started the ranks. One host that our own
launcher watches needs none of it.

rendezvous   what `launch` calls: the ranks of a start meet, in a store, and are watched; the end of what cannot begin
coordinator  heartbeats between hosts
"""
