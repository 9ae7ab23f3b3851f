// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes a bridge and taps in a network namespace of its own, for comparison with the networks that guests have today.
//!
//! The namespace has no name: it exists as long as a process in it does, and that process ends with this one. Without
//! root the namespace is in a user namespace, where the kernel allows that.

use crate::error::{Context, Error, Result};
use crate::line_reader::{LineReader, within};
use crate::process::{Process, tied};
use rustix::process::geteuid;
use std::process::{ChildStdin, Command, Stdio};

/// First three numbers of all addresses: nothing can collide with them in a namespace of its own.
const PREFIX: &str = "10.83.12";
/// Last number of the host's address.
const HOST: u8 = 254;

/// A network of guests and their host.
#[derive(Debug)]
pub struct Network {
    keeper: Process,
    /// Standard input of the process that keeps the namespace; the process ends when this is closed.
    _input: Option<ChildStdin>,
    user: bool,
    taps: u8,
}

/// Place of a guest in the network.
#[derive(Debug, Clone)]
pub struct Place {
    /// Address of the guest, for its first network card.
    pub address: String,
    /// Arguments for QEMU.
    pub args: Vec<String>,
}

impl Network {
    /// Makes a bridge with the host on it.
    ///
    /// # Errors
    /// The kernel grants no namespace or no bridge; the error tells which.
    pub fn open() -> Result<Self> {
        let user = !geteuid().is_root();
        let bridge =
            format!("ip link add br0 type bridge && ip address add {PREFIX}.{HOST}/24 dev br0 && ip link set br0 up");
        let script = format!("ip link set lo up && {bridge} && echo ready && exec cat");
        let mut unshare = tied(&[], "unshare");
        unshare.arg("--net");
        if user {
            unshare.args(["--user", "--map-root-user"]);
        }
        unshare.args(["--", "sh", "-c", &script]);
        unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = Process::start(&mut unshare)?;
        let said = keeper.stderr.take().map(LineReader::of);
        let ready = keeper.stdout.take().map(LineReader::of).and_then(|lines| lines.next_before(within(20)).ok());
        let input = keeper.stdin.take();
        let network = Self { keeper, _input: input, user, taps: 0 };
        match ready.as_deref() {
            Some("ready") => Ok(network),
            _ => {
                let why: Vec<String> = said.iter().flat_map(LineReader::ready).collect();
                Err(Error::new(format!("no network namespace with a bridge: {}", why.join("; "))))
            }
        }
    }

    /// Returns the host's address.
    #[must_use]
    pub fn host(&self) -> String {
        format!("{PREFIX}.{HOST}")
    }

    /// Returns the words that run a command in the namespace.
    #[must_use]
    pub fn enter(&self) -> Vec<String> {
        let target = self.keeper.id().to_string();
        let user: &[&str] = if self.user { &["--user", "--preserve-credentials"] } else { &[] };
        [&["nsenter", "--target", &target, "--net"], user, &["--"]].concat().into_iter().map(str::to_owned).collect()
    }

    /// Adds a card for one more guest. Segments of up to 64 KiB cross in one piece, as on any host with taps.
    ///
    /// # Errors
    /// The kernel grants no tap.
    pub fn tap(&mut self) -> Result<Place> {
        self.taps += 1;
        let (number, name) = (self.taps, format!("tap{}", self.taps));
        self.run(&format!("ip tuntap add dev {name} mode tap"))?;
        self.run(&format!("ip link set {name} master br0 up"))?;
        let args = [
            "-netdev".to_owned(),
            format!("tap,id=net,ifname={name},script=no,downscript=no,vhost=off"),
            "-device".to_owned(),
            format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:83:12:{number:02x}"),
        ];
        Ok(Place { address: format!("{PREFIX}.{number}"), args: args.to_vec() })
    }

    /// Returns the shell command that sets up a guest's network, once the modules are loaded.
    #[must_use]
    pub fn set_up(place: &Place) -> String {
        format!("ip link set lo up && ip address add {}/24 dev eth0 && ip link set eth0 up", place.address)
    }

    fn run(&self, command: &str) -> Result<()> {
        let words: Vec<String> = self.enter().into_iter().chain(command.split(' ').map(str::to_owned)).collect();
        let output = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).output().context(command)?;
        match output.status.success() {
            true => Ok(()),
            false => Err(Error::new(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()))),
        }
    }
}
