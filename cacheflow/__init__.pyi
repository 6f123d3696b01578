"""See ``__init__.py``."""

from cacheflow.errors import BackendError as BackendError
from cacheflow.errors import CacheFlowError as CacheFlowError
from cacheflow.errors import CapacityError as CapacityError
from cacheflow.errors import ClosedError as ClosedError
from cacheflow.errors import ConfigError as ConfigError
from cacheflow.errors import IntegrityError as IntegrityError
from cacheflow.errors import PeerError as PeerError
from cacheflow.metrics import PrometheusObserver as PrometheusObserver
from cacheflow.session import CacheFlow as CacheFlow
from cacheflow.session import Generation as Generation
from cacheflow.session import Session as Session
from cacheflow.session import Usage as Usage
from cacheflow.settings import Settings as Settings
from cacheflow.settings import TierSettings as TierSettings
from cacheflow.types import Sampling as Sampling

__version__: str
__all__: list[str]
