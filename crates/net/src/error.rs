// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Why there is no interface, and what to do about it.

use std::{io, path::PathBuf};

pub(crate) use tombolo_os::failed_call::{FailedCall, Os};

use crate::mac::Mac;

/// Why an interface could not be made, or has to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel or the container has no TAP devices.
    #[error(
        "/dev/net/tun is not there: load the kernel's module with `modprobe tun`, or give this container the device (`--device /dev/net/tun`)"
    )]
    NoTun,
    /// There is no module, or one that makes no interfaces.
    #[error(
        "/dev/net/tombolo is not there: load the module tombolo_ivshmem of this release in this virtual machine, or use `--engine tap`"
    )]
    NoModule,
    /// The module can do nothing for such an address.
    #[error("the kernel's engine is for addresses `vm:` alone: use `--engine tap` for {0}")]
    NotForKernel(String),
    /// The channel is not in memory of the module's.
    #[error("the channel's memory is not the module's, as on a host: use `--engine tap`")]
    NotInModule,
    /// Making an interface takes a right.
    #[error(
        "not permitted to make the interface {0}: run this as root or with CAP_NET_ADMIN, or have root make it for you: `ip tuntap add {0} mode tap user NAME; ip link set {0} up`"
    )]
    NotPermitted(String),
    /// Somebody has the name.
    #[error("there is an interface {0} already, and it is in use or no TAP device: choose another name")]
    NameTaken(String),
    /// Somebody else has the name that a network's interface is to have.
    #[error(
        "there is an interface {0} already, which is none that `tombolo net follow` made: rename it (`ip link set {0} down name OTHER`) or remove it, or give the network of the host's rules another name"
    )]
    NotOurs(String),
    /// The kernel makes no bridges.
    #[error("this kernel makes no bridges: `modprobe bridge`, or a kernel with CONFIG_BRIDGE")]
    NoBridges(#[source] io::Error),
    /// A port has no bridge any more.
    #[error("{name} is to be a port of {bridge}, and there is no such interface where {name} is")]
    NoBridge {
        /// The port.
        name: String,
        /// Its bridge.
        bridge: String,
    },
    /// No interface can be called so.
    #[error("{0:?} is no name of an interface: 1 to 15 bytes, without blanks, '/', ':' and '%'")]
    BadName(String),
    /// There is no such network namespace.
    #[error("no network namespace {path}: `ip netns list` shows those that have names")]
    NoNamespace {
        /// Where it was looked for.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel does not let this process into the namespace.
    #[error("cannot enter the network namespace {path}: it takes root (CAP_SYS_ADMIN)")]
    Namespace {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel takes no such address.
    #[error("the interface {name} does not take the address {mac}")]
    Mac {
        /// The interface.
        name: String,
        /// The address.
        mac: Mac,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel takes no such MTU.
    #[error("the interface {name} does not take an MTU of {mtu}")]
    Mtu {
        /// The interface.
        name: String,
        /// The MTU.
        mtu: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel takes no such address of IP.
    #[error("the interface {name} does not take the address {address}: `ip addr` shows what this kernel has")]
    Ip {
        /// The interface.
        name: String,
        /// The address.
        address: std::net::IpAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel could not be told to leave routes that lead nowhere.
    #[error("cannot write {path}: give the interface its address yourself, where /proc/sys is read-only")]
    Setting {
        /// Which setting.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody removed the interface.
    #[error("the interface {0} was removed")]
    Removed(String),
    /// The address is none, or nobody can listen there.
    #[error("cannot use {address}")]
    Address {
        /// The address.
        address: String,
        /// Why.
        source: tombolo::Error,
    },
    /// Where running interfaces are found.
    #[error("cannot use the folder {folder}")]
    Folder {
        /// Which.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A call that should not fail.
    #[error(transparent)]
    Os(#[from] FailedCall),
}

/// What this crate's calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
