// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps the networks of many members that the host's rules give this machine: one interface each, whose ports are the
//! interfaces to its peers (N-14).

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
};

use tombolo_control::Message;
use tombolo_net::{Bridge, BridgeConfig, Control, Error, Mac, Status, remove_stale_bridges, split_ip};

use crate::failure::{Failure, print_line};

/// Form in which a network appears here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// One interface, and a port for each peer.
    Ports,
    /// An interface for each peer.
    Plain,
}

/// Network that is wanted.
struct Network {
    config: BridgeConfig,
    /// Bridge and control socket, once the network could be made.
    running: Option<(Bridge, Control)>,
    /// Whether the kernel makes no bridges: the network then appears as interfaces.
    is_plain: bool,
    /// Reason why it could not be made the last time.
    complaint: String,
}

/// All networks that are wanted.
pub struct Networks {
    netns: Option<String>,
    /// Whether the user wants them as interfaces.
    are_plain: bool,
    folder: PathBuf,
    all: BTreeMap<String, Network>,
    /// Whether leftovers of a process that died were looked for.
    has_looked: bool,
}

impl Networks {
    /// Returns an empty set; networks that are added are found in `folder`.
    pub fn new(netns: Option<String>, are_plain: bool, folder: PathBuf) -> Self {
        Self { netns, are_plain, folder, all: BTreeMap::new(), has_looked: false }
    }

    /// Returns the configurations of the networks that exist or must exist.
    pub fn wanted(&self) -> BTreeMap<String, BridgeConfig> {
        self.all.iter().map(|(name, network)| (name.clone(), network.config.clone())).collect()
    }

    /// Returns the configurations of the networks that the rows want.
    pub fn wanted_by(rows: &[Message], netns: &Option<String>) -> BTreeMap<String, BridgeConfig> {
        let config = |row: &Message| match row {
            Message::Net { network, own_mac, own, prefix, .. } if !network.as_str().is_empty() => {
                let name = network.to_string();
                let ip = ip(*own).map(|own| split_ip(own, prefix_of(*prefix, own), None).0);
                Some((name.clone(), BridgeConfig { name, netns: netns.clone(), mac: Mac(*own_mac), ip }))
            }
            _ => None,
        };
        rows.iter().filter_map(config).collect()
    }

    /// Returns the form of a network; `None` while that is not known, or the network cannot be made.
    pub fn form(&self, network: &str) -> Option<Form> {
        let found = self.all.get(network)?;
        if self.are_plain || found.is_plain {
            return Some(Form::Plain);
        }
        found.running.as_ref().map(|_| Form::Ports)
    }

    /// Ends networks that are not wanted, or wanted differently; makes those that are missing.
    pub fn change(&mut self, rows: &[Message]) {
        let wanted = Self::wanted_by(rows, &self.netns);
        if !self.has_looked {
            self.has_looked = self.remove_stale(&wanted);
        }
        let names: Vec<String> = self.all.keys().cloned().collect();
        for name in names {
            if let Some(network) = self.all.remove(&name) {
                if wanted.get(&name) == Some(&network.config) {
                    self.all.insert(name, network);
                } else {
                    print_line(&format!("{name}: no rule of the host's wants it so any more"));
                    network.end();
                }
            }
        }
        for (name, config) in wanted {
            let fresh = || Network { config, running: None, is_plain: false, complaint: String::new() };
            let network = self.all.entry(name).or_insert_with(fresh);
            if !self.are_plain {
                network.keep_bridge(&self.folder);
            }
        }
    }

    /// Ends all networks.
    pub fn end(&mut self) {
        std::mem::take(&mut self.all).into_values().for_each(Network::end);
    }

    /// Removes leftovers of a process that died that no rule wants. Returns whether that was done.
    fn remove_stale(&self, wanted: &BTreeMap<String, BridgeConfig>) -> bool {
        let names: Vec<&str> = wanted.keys().filter(|_| !self.are_plain).map(String::as_str).collect();
        match remove_stale_bridges(self.netns.as_deref(), &names) {
            Ok(removed) => {
                for name in removed {
                    print_line(&format!("{name}: left by a process that died, and no rule of the host's wants it"));
                }
                true
            }
            Err(error) => {
                print_line(&Failure::from(error).chain());
                false
            }
        }
    }

    /// Returns the descriptors that poll readable once a program asks.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.values().filter_map(|network| network.running.as_ref()).map(|(_, control)| control.as_fd())
    }

    /// Answers requests about networks, with the status of all interfaces.
    pub fn answer(&self, interfaces: impl Fn() -> Vec<Status>) {
        for (name, network) in &self.all {
            let Some((bridge, control)) = &network.running else { continue };
            let mut ports = interfaces();
            ports.retain(|port| port.network.as_deref() == Some(name));
            // A request to end the network is not acted on: `tombolo net down` has refused it already, because a rule
            // wants it.
            control.answer(&bridge.status(&ports));
        }
    }
}

impl Network {
    /// Makes the bridge if it does not exist, or was removed.
    fn keep_bridge(&mut self, folder: &std::path::Path) {
        if self.is_plain {
            return;
        }
        let name = self.config.name.clone();
        match self.running.as_ref().map(|(bridge, _)| bridge.keep_address()) {
            Some(Ok(true)) => return,
            Some(Ok(false)) => {
                print_line(&format!("{name}: somebody removed it, and it is made again"));
                self.running.take().map(|(bridge, _)| bridge.remove());
            }
            Some(Err(error)) => return self.complain(error),
            None => {}
        }
        let begun = Control::open(folder, &name).and_then(|control| Ok((Bridge::open(&self.config)?, control)));
        match begun {
            Ok(running) => (self.running, self.complaint) = (Some(running), String::new()),
            Err(error @ Error::NoBridges(_)) => {
                self.is_plain = true;
                print_line(&format!(
                    "{name}: an interface for each peer, {name}-PEER, and not one: {}",
                    Failure::from(error).chain()
                ));
            }
            Err(error) => self.complain(error),
        }
    }

    fn complain(&mut self, error: Error) {
        let complaint = Failure::from(error).chain();
        if self.complaint != complaint {
            print_line(&format!("{}: {complaint}", self.config.name));
            self.complaint = complaint;
        }
    }

    fn end(self) {
        if let Some((bridge, _control)) = self.running
            && let Err(error) = bridge.remove()
        {
            print_line(&format!("{}: {}", self.config.name, Failure::from(error).chain()));
        }
    }
}

/// Converts an address as the broker sends it: all zeros for none, IPv4 mapped into IPv6.
pub fn ip(bytes: [u8; 16]) -> Option<IpAddr> {
    Some(Ipv6Addr::from(bytes)).filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_canonical())
}

/// Returns the bits of the network behind an address. The broker counts them out of 128, and 0 means none.
pub fn prefix_of(prefix: u8, own: IpAddr) -> Option<u8> {
    match (prefix, own) {
        (0, _) => None,
        (bits, IpAddr::V4(_)) => bits.checked_sub(96),
        (bits, IpAddr::V6(_)) => Some(bits),
    }
}
