// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, channel, backends, tombolo.
//!
//! A network interface whose frames cross a Tombolo channel, as `tombolo net` runs it. `docs/guide/net.md` describes
//! its use, `spec/9-net.md` the protocol of the two endpoints.
//!
//! `hello`, `features`, `mac` and `frame` implement the specification's bytes, without side effects. `sys`, `netlink`,
//! `handle`, `tap` and `kernel` implement the interface, `bridge` that of a network of many. `pump` moves frames in
//! both directions of a link, `greeting` exchanges the hellos, `engine` meets the peer and starts again when a link
//! ends; `status`, `counters` and `control` inform others.
#![deny(unsafe_code)]

mod bridge;
mod config;
mod control;
mod counters;
mod engine;
mod error;
mod features;
mod flag;
mod frame;
mod greeting;
mod handle;
mod hello;
mod kernel;
mod mac;
mod netlink;
mod nic;
mod pump;
mod status;
mod sys;
mod tap;

pub use bridge::{Bridge, BridgeConfig, BridgeStatus, Moved, PortStatus, remove_stale_bridges, split_ip};
pub use config::{Config, EngineKind, Member, Place, RING_DEFAULT, RING_LEAST};
pub use control::{Control, Found, Request, find, folder};
pub use counters::{Dropped, Figures};
pub use engine::{Engine, Report};
pub use error::{Error, Result};
pub use features::Features;
pub use frame::{DropReason, ETHERNET, Frame, HEAD, HEADER, Limits};
pub use handle::{IpConfig, NicConfig, PortConfig, namespace_path};
pub use hello::{FRAME_MOST, Hello, HelloError, LEN as HELLO_LEN, MTU_LEAST, MTU_MOST, VERSION};
pub use mac::Mac;
pub use status::{PeerStatus, State, Status};
