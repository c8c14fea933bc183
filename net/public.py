"""The names that the package promises; each is an attribute of `net` itself, which loads this module when first asked.

Not imported by any other module of the package: those import one another, and `import net.errors` stays cheap.
"""

from net.averaging.averager import Averager, AveragingStep
from net.averaging.config import AveragerConfig
from net.averaging.grouping.group import Role
from net.averaging.grouping.group_key import MoshpitGrid
from net.averaging.grouping.matchmaking import AssemblyConfig
from net.averaging.opening import open_averager
from net.averaging.plan import AveragingPlan
from net.averaging.reduction.partition import AllReduceConfig
from net.averaging.speeds import Speeds
from net.averaging.state.download import StateUnavailable
from net.averaging.state.sharing import SharedState, StateSharingConfig, StateSource
from net.clock import SwarmClock
from net.dht.config import DhtConfig
from net.dht.node import DhtNode, DhtStatistics, StoreItem, open_dht_node
from net.dht.records import Dictionary, Entry
from net.errors import (
    CallFailed,
    CallRefused,
    ConnectionLost,
    DialFailed,
    HandshakeFailed,
    ListenFailed,
    LocalProtocolError,
    NetError,
    NoQuorum,
    PeerBusy,
    PeerTimeout,
    PeerUnavailable,
    RemoteFailure,
    RemoteProtocolError,
)
from net.identity import Address, Contact, PeerId
from net.key_files import create_identity, load_identity, load_or_create_identity
from net.keys import Identity, Membership
from net.peer_health import Pause, PeerHealth
from net.rpc.base import Body, Caller, Handler, Reply, Request, handlers
from net.rpc.faults import Fault, FaultInjector, FaultPlan
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.base import Transport
from net.transport.sim import (
    Constant,
    Heal,
    HostDown,
    HostOptions,
    HostUp,
    LogNormal,
    Partition,
    SimNetwork,
    run,
    simulate,
)
from net.transport.tcp import TcpTransport
from net.transport.tls import TlsTransport
from net.wire.compression import Compressed, Compression

# fmt: off
__all__ = [
    "Address", "AllReduceConfig", "AssemblyConfig", "Averager", "AveragerConfig", "AveragingPlan", "AveragingStep",
    "Body",
    "CallFailed", "CallRefused", "Caller", "Compressed", "Compression", "ConnectionLost", "Constant", "Contact",
    "DhtConfig", "DhtNode", "DhtStatistics", "DialFailed", "Dictionary", "Entry", "Fault", "FaultInjector",
    "FaultPlan", "Handler", "HandshakeFailed", "Heal", "HostDown", "HostOptions", "HostUp", "Identity",
    "ListenFailed", "LocalProtocolError", "LogNormal", "Membership", "MoshpitGrid", "NetError", "NoQuorum",
    "Partition", "Pause", "PeerBusy", "PeerHealth", "PeerId", "PeerTimeout", "PeerUnavailable", "RemoteFailure",
    "RemoteProtocolError", "Reply", "Request", "Role", "RpcPeer", "SharedState", "SimNetwork", "Speeds",
    "StateSharingConfig", "StateSource", "StateUnavailable", "StoreItem", "SwarmClock", "TcpTransport", "TlsTransport",
    "Transport", "create_identity", "handlers", "load_identity", "load_or_create_identity", "open_averager",
    "open_dht_node", "open_rpc_peer", "run", "simulate",
]
# fmt: on
