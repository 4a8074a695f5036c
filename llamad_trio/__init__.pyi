# The public names, each from the module that has it.

from .core.completion import (
    Choice as Choice,
    Completion as Completion,
    Done as Done,
    ReasoningDelta as ReasoningDelta,
    StreamEvent as StreamEvent,
    TextDelta as TextDelta,
    TokenLogprob as TokenLogprob,
    ToolCallDelta as ToolCallDelta,
    ToolCallStart as ToolCallStart,
)
from .core.config import EngineConfig as EngineConfig, Limits as Limits
from .core.engine_events import (
    EngineEvent as EngineEvent,
    EngineFailed as EngineFailed,
    EngineLoaded as EngineLoaded,
    EngineRestarted as EngineRestarted,
    EngineStopped as EngineStopped,
    FirstToken as FirstToken,
    Lagged as Lagged,
    PrefixReused as PrefixReused,
    RequestCancelled as RequestCancelled,
    RequestFailed as RequestFailed,
    RequestFinished as RequestFinished,
    RequestPreempted as RequestPreempted,
    RequestQueued as RequestQueued,
    RequestStarted as RequestStarted,
    StepDone as StepDone,
    ThreadsChanged as ThreadsChanged,
)
from .core.engine_spec import EngineSpec as EngineSpec
from .core.errors import (
    Busy as Busy,
    ConfigError as ConfigError,
    ContextOverflow as ContextOverflow,
    Disconnected as Disconnected,
    EngineClosed as EngineClosed,
    EngineCrashed as EngineCrashed,
    IncompleteOutput as IncompleteOutput,
    InferenceError as InferenceError,
    InsufficientMemory as InsufficientMemory,
    LlamadError as LlamadError,
    ModelLoadError as ModelLoadError,
    PromptTooLong as PromptTooLong,
    ProtocolError as ProtocolError,
    RestartsExhausted as RestartsExhausted,
    SessionFatal as SessionFatal,
    SocketUnavailable as SocketUnavailable,
    UnsupportedFeature as UnsupportedFeature,
)
from .core.info import (
    DaemonStats as DaemonStats,
    EngineStats as EngineStats,
    ModelInfo as ModelInfo,
    ModelStats as ModelStats,
)
from .core.request import Message as Message, Request as Request
from .core.restarts import RestartPolicy as RestartPolicy
from .core.tools import Tool as Tool, ToolCall as ToolCall
from .engine.engine import Engine as Engine
from .engine.engine_like import EngineLike as EngineLike
from .engine.lane import Lane as Lane
from .engine.session import (
    ContextReport as ContextReport,
    PrefixStatus as PrefixStatus,
    Segment as Segment,
    Session as Session,
    SuffixStatus as SuffixStatus,
)
from .engine.stream import EventStream as EventStream, TokenStream as TokenStream
from .engine.tool_loop import ToolRun as ToolRun, run_tools as run_tools
from .memory import MemoryEstimate as MemoryEstimate, estimate_memory as estimate_memory
from .opening import open_engine as open_engine
from .remote.remote import (
    RemoteEngine as RemoteEngine,
    connect as connect,
    daemon_stats as daemon_stats,
)
from .serving.listener import serve_unix as serve_unix
from .supervision.models import Model as Model, Models as Models, open_models as open_models
from .watch.broadcast import EventReader as EventReader
