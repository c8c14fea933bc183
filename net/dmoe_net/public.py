"""The names that the package promises; each is an attribute of `dmoe_net`, which loads this module when first asked.

Not imported by any other module of the package: those import one another, and `import dmoe_net.errors` stays cheap.
"""

from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.averaging.state.download import StateUnavailable
from dmoe_net.averaging.state.sharing import SharedState, StateSharingConfig, StateSource
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.entries import Found
from dmoe_net.dht.node import DhtNode, DhtStatistics, StoreItem, open_dht_node
from dmoe_net.errors import (
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
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.key_files import create_identity, load_identity, load_or_create_identity
from dmoe_net.keys import Identity, Membership
from dmoe_net.peer_health import Pause, PeerHealth
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request, handlers
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.base import Transport
from dmoe_net.transport.sim import (
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
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.wire.compression import Compressed, Compression

# fmt: off
__all__ = [
    "Address", "AllReduceConfig", "AssemblyConfig", "Averager", "AveragerConfig", "AveragingPlan", "AveragingStep",
    "Body",
    "CallFailed", "CallRefused", "Caller", "Compressed", "Compression", "ConnectionLost", "Constant", "Contact",
    "DhtConfig", "DhtNode", "DhtStatistics", "DialFailed", "Fault", "FaultInjector",
    "FaultPlan", "Found", "Handler", "HandshakeFailed", "Heal", "HostDown", "HostOptions", "HostUp", "Identity",
    "ListenFailed", "LocalProtocolError", "LogNormal", "Membership", "MoshpitGrid", "NetError", "NoQuorum",
    "Partition", "Pause", "PeerBusy", "PeerHealth", "PeerId", "PeerTimeout", "PeerUnavailable", "RemoteFailure",
    "RemoteProtocolError", "Reply", "Request", "Role", "RpcPeer", "SharedState", "SimNetwork", "Speeds",
    "StateSharingConfig", "StateSource", "StateUnavailable", "StoreItem", "SwarmClock", "TcpTransport", "TlsTransport",
    "Transport", "create_identity", "handlers", "load_identity", "load_or_create_identity", "open_averager",
    "open_dht_node", "open_rpc_peer", "run", "simulate",
]
# fmt: on
