// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, channel, backends, tombolo.
//!
//! A network interface whose frames cross a Tombolo channel: what `tombolo net` runs. `docs/guide/net.md` says how to use
//! it, `spec/9-net.md` what two ends say to each other.
//!
//! `hello`, `features`, `mac` and `frame` are the specification's bytes, and touch nothing. `sys`, `netlink`,
//! `handle`, `tap` and `kernel` are the interface, `bridge` is that of a network of many. `pump` has the two directions of a link, `greeting` the hellos, `engine` meets the peer and begins again when a link ends;
//! `status`, `counters` and `control` tell others.
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
