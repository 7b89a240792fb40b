"""Several replicas of a pair behind one HTTP interface, on Ray Serve: `mtad serve PAIR --replicas N`.

Needs the extra `cluster`. Each replica is a process with an engine and the whole application of `runtime.server`. Ray
Serve routes, watches, replaces and scales them; the gateway, in the process of the command, is what HTTP needs besides.
"""
