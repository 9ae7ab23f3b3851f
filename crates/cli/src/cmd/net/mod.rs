// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net`: network interfaces whose frames cross a channel.

mod show;

use std::{os::fd::AsFd, path::PathBuf};

use clap::Subcommand;
use tombolo_bench::size;
use tombolo_net::{
    Config, Control, Engine, EngineKind, Found, MTU_LEAST, MTU_MOST, Mac, NicConfig, Place, RING_DEFAULT, RING_LEAST,
    Request,
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

fn ring(text: &str) -> std::result::Result<usize, String> {
    match size::parse(text)? {
        size if size.is_power_of_two() && size as u64 >= RING_LEAST => Ok(size),
        _ => Err(format!("a ring is a power of two from {} KiB", RING_LEAST >> 10)),
    }
}

pub fn run(args: &Args) -> Result<()> {
    let folder = args.folder.clone().unwrap_or_else(tombolo_net::folder);
    match &args.action {
        Action::Up(up) => up.run(&folder),
        Action::Ls { json } => {
            let found = tombolo_net::find(&folder)?;
            output::unless_unread(show::list(&found, *json))
        }
        Action::Stat { name, which, json } => {
            let found = match name {
                Some(name) => vec![which.one(name, &folder)?],
                None => tombolo_net::find(&folder)?,
            };
            output::unless_unread(show::all(&found, *json))
        }
        Action::Down { name, which, json } => {
            let found = which.one(name, &folder)?;
            found.end().map_err(|error| Failure::Outcome(format!("{name} does not end: {error}")))?;
            if *json { output::unless_unread(output::json(&found.status)) } else { Ok(()) }
        }
    }
}

impl Which {
    /// The running interface of this name.
    fn one(&self, name: &str, folder: &std::path::Path) -> Result<Found> {
        let mut found = tombolo_net::find(folder)?;
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
                folder.display()
            ))),
        }
    }
}

impl UpArgs {
    fn run(&self, folder: &std::path::Path) -> Result<()> {
        let signals = Signals::hold()?;
        let control = Control::open(folder)?;
        let engine = Engine::start(self.config(), Box::new(print_line))?;
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
        // Who waits for the socket to go finds the interface gone.
        drop(control);
        Ok(())
    }

    fn config(&self) -> Config {
        let place = match (&self.connect, &self.listen) {
            (Some(address), _) => Place::Connect(address.clone()),
            (None, Some(address)) => Place::Listen(address.clone()),
            (None, None) => unreachable!("one of them is required"),
        };
        let machine = std::fs::read("/etc/machine-id").ok().filter(|id| !id.is_empty());
        let words = [place.role(), place.address(), &self.name];
        let engine = match self.engine {
            EngineName::Tap => EngineKind::Tap,
            EngineName::Kernel => EngineKind::Kernel,
            EngineName::Auto => EngineKind::Auto,
        };
        let nic = NicConfig {
            name: self.name.clone(),
            netns: self.netns.clone(),
            mac: self.mac,
            default_mac: machine.map(|machine| Mac::derived(&machine, words)),
            mtu: self.mtu,
        };
        Config { nic, engine, place, any_source: self.any_source, ring: self.ring as u64 }
    }
}
