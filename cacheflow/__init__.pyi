"""See ``__init__.py``."""

from cacheflow.metrics import PrometheusObserver as PrometheusObserver
from cacheflow.session import CacheFlow as CacheFlow
from cacheflow.session import Generation as Generation
from cacheflow.session import Session as Session
from cacheflow.session import Usage as Usage
from cacheflow.settings import Settings as Settings
from cacheflow.settings import TierSettings as TierSettings

__version__: str
__all__: list[str]
