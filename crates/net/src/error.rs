// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of this crate, with advice what to do about them.

use std::{io, path::PathBuf};

pub(crate) use tombolo_os::failed_call::{FailedCall, Os};

use crate::mac::Mac;

/// Reason for which an interface could not be made, or has to end.
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
    /// The module does not support this kind of address.
    #[error("the kernel's engine is for addresses `vm:` alone: use `--engine tap` for {0}")]
    NotForKernel(String),
    /// The channel is not in memory of the module.
    #[error("the channel's memory is not the module's, as on a host: use `--engine tap`")]
    NotInModule,
    /// A privilege for making an interface is missing.
    #[error(
        "not permitted to make the interface {0}: run this as root or with CAP_NET_ADMIN, or have root make it for you: `ip tuntap add {0} mode tap user NAME; ip link set {0} up`"
    )]
    NotPermitted(String),
    /// The name is in use.
    #[error("there is an interface {0} already, and it is in use or no TAP device: choose another name")]
    NameTaken(String),
    /// Another interface has the name that a network's bridge is to have.
    #[error(
        "there is an interface {0} already, which is none that `tombolo net follow` made: rename it (`ip link set {0} down name OTHER`) or remove it, or give the network of the host's rules another name"
    )]
    NotOurs(String),
    /// The kernel makes no bridges.
    #[error("this kernel makes no bridges: `modprobe bridge`, or a kernel with CONFIG_BRIDGE")]
    NoBridges(#[source] io::Error),
    /// The bridge of a port does not exist.
    #[error("{name} is to be a port of {bridge}, and there is no such interface where {name} is")]
    NoBridge {
        /// Name of the port.
        name: String,
        /// Name of its bridge.
        bridge: String,
    },
    /// An interface cannot have this name.
    #[error("{0:?} is no name of an interface: 1 to 15 bytes, without blanks, '/', ':' and '%'")]
    BadName(String),
    /// There is no such network namespace.
    #[error("no network namespace {path}: `ip netns list` shows those that have names")]
    NoNamespace {
        /// Path at which it was looked for.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel does not let this process enter the namespace.
    #[error("cannot enter the network namespace {path}: it takes root (CAP_SYS_ADMIN)")]
    Namespace {
        /// Path of the namespace.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel refuses the hardware address.
    #[error("the interface {name} does not take the address {mac}")]
    Mac {
        /// Name of the interface.
        name: String,
        /// The refused address.
        mac: Mac,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel refuses the MTU.
    #[error("the interface {name} does not take an MTU of {mtu}")]
    Mtu {
        /// Name of the interface.
        name: String,
        /// The refused MTU.
        mtu: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel refuses the IP address.
    #[error("the interface {name} does not take the address {address}: `ip addr` shows what this kernel has")]
    Ip {
        /// Name of the interface.
        name: String,
        /// The refused address.
        address: std::net::IpAddr,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A setting of an interface could not be written, such as the one that ignores routes without a carrier.
    #[error("cannot write {path}: give the interface its address yourself, where /proc/sys is read-only")]
    Setting {
        /// Path of the setting.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The interface was removed.
    #[error("the interface {0} was removed")]
    Removed(String),
    /// The address is invalid, or this process cannot listen there.
    #[error("cannot use {address}")]
    Address {
        /// The address.
        address: String,
        /// Cause of the error.
        source: tombolo::Error,
    },
    /// The folder in which running interfaces are found cannot be used.
    #[error("cannot use the folder {folder}")]
    Folder {
        /// Path of the folder.
        folder: PathBuf,
        /// Cause of the error.
        source: io::Error,
    },
    /// A call failed that should not fail.
    #[error(transparent)]
    Os(#[from] FailedCall),
}

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
