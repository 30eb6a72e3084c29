"""`raydix validate`: configuration files checked before anything is started, with neither network nor cluster.

Ray accepts a misspelt key of a Serve file silently and finds other mistakes only when nodes cost money already. Here
every key is known or refused, values are parsed by the classes that will parse them later, and the groups of ranks are
placed on the nodes that a cluster file allows.
"""

from cluster.validate.check import Report, validate_files
from cluster.validate.problems import Problem

__all__ = ["Problem", "Report", "validate_files"]
