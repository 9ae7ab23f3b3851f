// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net`: manages network interfaces whose frames cross a channel.

mod follow;
mod networks;
mod show;

use std::{net::IpAddr, os::fd::AsFd, path::PathBuf};

use clap::Subcommand;
use tombolo_bench::size;
use tombolo_net::{
    Config, Control, Engine, EngineKind, Found, IpConfig, MTU_LEAST, MTU_MOST, Mac, NicConfig, Place, RING_DEFAULT,
    RING_LEAST, Request,
};

use crate::{
    failure::{Failure, Result, print_line},
    output,
    signals::{Signals, await_any},
};

/// Join two domains by a network interface whose frames cross shared memory
#[derive(clap::Args)]
pub struct Args {
    /// The folder where running interfaces are found [default: `net` in the folder of services]
    #[arg(long, value_name = "FOLDER", global = true)]
    folder: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Make an interface and move its frames, until interrupted; its carrier is on while a peer is there
    Up(UpArgs),
    /// Make the interfaces that the host's rules give this machine, until interrupted; tombolo-net.service runs this
    Follow(follow::FollowArgs),
    /// Show running interfaces
    Ls {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Show all that is known of interfaces: counters, and what was dropped and why
    Stat {
        /// This one alone
        name: Option<String>,
        #[command(flatten)]
        which: Which,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// End an interface
    Down {
        /// Its name
        name: String,
        #[command(flatten)]
        which: Which,
        /// Print what it was as a JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
struct UpArgs {
    /// Its name, such as tmb0
    name: String,
    /// Connect to the peer that listens at this address, now or later
    #[arg(long, value_name = "ADDRESS", required_unless_present = "listen", conflicts_with = "listen")]
    connect: Option<String>,
    /// Let the peer connect to this address
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Make it in this network namespace: a name of `ip netns`, or a path
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,
    /// The longest packet; the smaller of the two ends holds [default: as the interface has it, 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(i64::from(MTU_LEAST)..=i64::from(MTU_MOST)))]
    mtu: Option<u32>,
    /// Its address [default: always the same for this machine, name and channel]
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,
    /// Its address of IP; with /BITS for the network behind it. Routes over it count while there is a carrier
    #[arg(long, value_name = "ADDRESS[/BITS]", value_parser = parse_ip)]
    ip: Option<(IpAddr, Option<u8>)>,
    /// The peer's address of IP: with --ip and no /BITS the only one that is reached
    #[arg(long, value_name = "ADDRESS", requires = "ip")]
    peer_ip: Option<IpAddr>,
    /// Take frames from other addresses than the peer's own: for a peer whose interface is a bridge's port
    #[arg(long)]
    any_source: bool,
    /// Bytes of the ring to the peer: a power of two from 256KiB
    #[arg(long, value_name = "SIZE", default_value_t = RING_DEFAULT as usize, value_parser = ring)]
    ring: usize,
    /// Who moves its frames
    #[arg(long, value_name = "WHO", value_enum, default_value = "tap")]
    engine: EngineName,
}

/// Who moves the frames.
#[derive(Clone, Copy, clap::ValueEnum)]
enum EngineName {
    /// This process, through a TAP device: everywhere
    Tap,
    /// The kernel's module, in a virtual machine that has it: vm: alone
    Kernel,
    /// The module where it can, else this process
    Auto,
}

/// Where several interfaces have one name.
#[derive(clap::Args)]
struct Which {
    /// The one in this network namespace, as it was given to `up`
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,
}

fn parse_ip(text: &str) -> std::result::Result<(IpAddr, Option<u8>), String> {
    tombolo_control::parse_ip(text)
        .ok_or_else(|| format!("{text:?}: write it as 10.9.0.1, as 10.9.0.1/24 or as fd00::1/64"))
}

fn ring(text: &str) -> std::result::Result<usize, String> {
    match size::parse(text)? {
        size if size.is_power_of_two() && size as u64 >= RING_LEAST => Ok(size),
        _ => Err(format!("a ring is a power of two from {} KiB", RING_LEAST >> 10)),
    }
}

/// Folder of the interfaces of the host's rules, whatever other folder their user has.
pub const RULES_FOLDER: &str = "/run/tombolo/net";

/// Folders where running interfaces are found.
struct Folders(Vec<PathBuf>);

impl Folders {
    fn find(&self) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        for (at, folder) in self.0.iter().enumerate() {
            match tombolo_net::find(folder) {
                Ok(here) => found.extend(here),
                // The folder of the host's rules is root's.
                Err(_) if at > 0 => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(found)
    }
}

pub fn run(args: &Args) -> Result<()> {
    let named = args.folder.clone();
    let folder = named.clone().unwrap_or_else(tombolo_net::folder);
    let rules = named.clone().unwrap_or_else(|| RULES_FOLDER.into());
    let mut folders = Folders(vec![folder.clone(), rules.clone()]);
    folders.0.dedup();
    match &args.action {
        Action::Up(up) => up.run(&folder),
        Action::Follow(follow) => follow.run(&rules),
        Action::Ls { json } => {
            let found = folders.find()?;
            output::unless_unread(show::list(&found, *json))
        }
        Action::Stat { name, which, json } => {
            let found = match name {
                Some(name) => vec![which.one(name, &folders)?],
                None => folders.find()?,
            };
            output::unless_unread(show::all(&found, *json))
        }
        Action::Down { name, which, json } => {
            let found = which.one(name, &folders)?;
            if found.is_by_rule() {
                return Err(Failure::Usage(format!(
                    "{name} is there by a rule of the host's: take `[[net]]` out of its tombolod.toml, or \
                     `systemctl stop tombolo-net` here"
                )));
            }
            found.end().map_err(|error| Failure::Outcome(format!("{name} does not end: {error}")))?;
            if *json { output::unless_unread(output::json(&found.status)) } else { Ok(()) }
        }
    }
}

impl Which {
    /// Returns the running interface of this name.
    fn one(&self, name: &str, folders: &Folders) -> Result<Found> {
        let mut found = folders.find()?;
        found.retain(|found| found.is_called(name));
        if let Some(netns) = &self.netns {
            found.retain(|found| found.status["netns"] == **netns);
        }
        match (found.pop(), found.is_empty()) {
            (Some(one), true) => Ok(one),
            (Some(_), false) => {
                Err(Failure::Usage(format!("several interfaces are called {name}: say which with --netns")))
            }
            (None, _) => Err(Failure::Outcome(format!(
                "no interface {name} runs here: `tombolo net ls` shows those of this user in {}",
                folders.0[0].display()
            ))),
        }
    }
}

impl UpArgs {
    fn run(&self, folder: &std::path::Path) -> Result<()> {
        let signals = Signals::hold()?;
        let control = Control::open(folder, &self.name)?;
        let engine = Engine::start(self.config()?, Box::new(print_line))?;
        loop {
            await_any(&[signals.fd(), control.as_fd(), engine.ended()], None)?;
            if signals.caught().is_some() || control.answer(&engine.status()) == Some(Request::Down) {
                break;
            }
            if await_any(&[engine.ended()], Some(std::time::Duration::ZERO))?[0] {
                break;
            }
        }
        engine.stop()?;
        // A program that waits for the socket to disappear then finds the interface gone.
        drop(control);
        Ok(())
    }

    fn config(&self) -> Result<Config> {
        let place = match (&self.connect, &self.listen) {
            (Some(address), _) => Place::Connect(address.clone()),
            (None, Some(address)) => Place::Listen(address.clone()),
            (None, None) => unreachable!("one of them is required"),
        };
        if let (Some((own, _)), Some(peer)) = (self.ip, self.peer_ip)
            && own.is_ipv4() != peer.is_ipv4()
        {
            return Err(Failure::Usage(
                "--ip and --peer-ip are of two kinds: give both as IPv4, or both as IPv6".into(),
            ));
        }
        let nic = NicConfig {
            name: self.name.clone(),
            netns: self.netns.clone(),
            mac: self.mac,
            default_mac: default_mac(&place, &self.name),
            mtu: self.mtu,
            ip: self.ip.map(|(own, bits)| IpConfig::new(own, bits, self.peer_ip)),
            port: None,
        };
        let (engine, ring) = (self.engine.into(), self.ring as u64);
        Ok(Config { nic, engine, place, any_source: self.any_source, ring, by_rule: false, member: None })
    }
}

impl From<EngineName> for EngineKind {
    fn from(name: EngineName) -> Self {
        match name {
            EngineName::Tap => Self::Tap,
            EngineName::Kernel => Self::Kernel,
            EngineName::Auto => Self::Auto,
        }
    }
}

/// Derives the address of an interface for which none is asked: always the same for this machine.
fn default_mac(place: &Place, name: &str) -> Option<Mac> {
    let machine = std::fs::read("/etc/machine-id").ok().filter(|id| !id.is_empty());
    machine.map(|machine| Mac::derived(&machine, [place.role(), place.address(), name]))
}
