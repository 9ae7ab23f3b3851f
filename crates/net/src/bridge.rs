// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A network of many as one interface: a bridge of the kernel's, whose ports lead to one peer each (N-14).

use std::{fs, net::IpAddr};

use rustix::io::Errno;
use serde::Serialize;

use crate::{
    error::{Error, Os, Result},
    handle::{IpConfig, enter_and, ignore_routes_without_carrier, in_namespace, none_is_fine, write_setting},
    mac::Mac,
    netlink::{Link, Netlink},
    status::{State, Status},
};

/// What is written on each, before what it is to be.
const LABEL: &str = "tombolo network";

/// How the one interface is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BridgeConfig {
    /// Its name.
    pub name: String,
    /// The network namespace that it is to be in: a name as `ip netns` knows it, or a path.
    pub netns: Option<String>,
    /// Its hardware address, and that of each of its ports.
    pub mac: Mac,
    /// Its address of IP, if it is to get one.
    pub ip: Option<IpConfig>,
}

impl BridgeConfig {
    /// What is written on it, so that another process knows it for what it is.
    fn label(&self) -> String {
        let ip = self.ip.map(|ip| format!(" {}/{}", ip.own, ip.reached.1)).unwrap_or_default();
        format!("{LABEL} {} {}{ip}", self.name, self.mac)
    }

    /// Whether an interface is one that was made for this, now or by a process that died.
    fn is_of(&self, link: &Link) -> bool {
        let is_unfinished = link.alias.is_empty() && link.mac == self.mac;
        link.kind == "bridge" && (link.alias.starts_with(LABEL) || is_unfinished)
    }
}

/// The one interface. It outlives this value and this process, so that one that is started again finds it.
#[derive(Debug)]
pub struct Bridge {
    config: BridgeConfig,
    netlink: Netlink,
    index: i32,
}

/// What a network tells of itself.
#[derive(Clone, Debug, Serialize)]
pub struct BridgeStatus {
    /// The interface.
    pub interface: String,
    /// The network namespace that it was made in, if it was named.
    pub netns: Option<String>,
    /// The process that looks after it.
    pub pid: u32,
    /// `network`: its links are its ports'.
    pub kind: &'static str,
    /// Whether a rule of the host's wants it, which is so.
    pub by_rule: bool,
    /// Linked while one port is.
    pub state: State,
    /// How many ports are linked, in words.
    pub reason: String,
    /// Its hardware address.
    pub mac: Mac,
    /// Its MTU.
    pub mtu: u32,
    /// Its ports, each of which has a status of its own.
    pub ports: Vec<PortStatus>,
    /// What went to all peers.
    pub sent: Moved,
    /// What came from all.
    pub received: Moved,
}

/// A port, as its network tells of it.
#[derive(Clone, Debug, Serialize)]
pub struct PortStatus {
    /// The interface.
    pub interface: String,
    /// Who is behind it, while there is a link.
    pub peer: Option<String>,
    /// Whether there is a link.
    pub state: State,
}

/// What crossed all ports that there are.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Moved {
    /// Frames.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames that went no further.
    pub dropped: u64,
}

impl Bridge {
    /// Makes it, or takes the one that a process which died had made.
    ///
    /// # Errors
    /// Somebody else has the name, the kernel makes no bridges, or it takes a right.
    pub fn open(config: &BridgeConfig) -> Result<Self> {
        in_namespace(&config.name, config.netns.as_deref(), || Self::open_here(config))
    }

    fn open_here(config: &BridgeConfig) -> Result<Self> {
        let netlink = Netlink::open().os("socket")?;
        let label = config.label();
        let index = match netlink.find(&config.name).os("RTM_GETLINK")? {
            Some(link) if !config.is_of(&link) => return Err(Error::NotOurs(config.name.clone())),
            Some(link) if link.alias == label => link.index,
            found => {
                if let Some(link) = found {
                    netlink.delete_link(link.index).os("RTM_DELLINK")?;
                }
                make(&netlink, config)?
            }
        };
        // Last: what is not labelled is not finished.
        netlink.set_alias(index, &label).os("RTM_NEWLINK")?;
        Ok(Self { config: config.clone(), netlink, index })
    }

    /// How it is to be.
    #[must_use]
    pub fn config(&self) -> &BridgeConfig {
        &self.config
    }

    /// Sees that it has its hardware address, which peers expect, and its address of IP: the kernel forgets one of IPv6 when an
    /// interface is switched off. Returns `false` where it is not there any more.
    ///
    /// # Errors
    /// The kernel does not say, or does not let it have its address.
    pub fn keep_address(&self) -> Result<bool> {
        match self.netlink.find(&self.config.name).os("RTM_GETLINK")? {
            Some(link) if link.index == self.index => {
                if link.mac != self.config.mac {
                    self.netlink.set_mac(self.index, self.config.mac).os("RTM_NEWLINK")?;
                }
                if link.up {
                    give_ip(&self.netlink, self.index, &self.config)?;
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// What it is doing, with what its ports say.
    #[must_use]
    pub fn status(&self, ports: &[Status]) -> BridgeStatus {
        let link = self.netlink.link(self.index).ok();
        let linked = ports.iter().filter(|port| port.state == State::Linked).count();
        let ports_told = ports.iter().map(|port| PortStatus {
            interface: port.interface.clone(),
            peer: port.peer.as_ref().map(|peer| peer.domain.clone()),
            state: port.state,
        });
        let sum = |all: &mut dyn Iterator<Item = &crate::Figures>| {
            all.fold(Moved::default(), |sum, port| Moved {
                frames: sum.frames + port.frames,
                bytes: sum.bytes + port.bytes,
                dropped: sum.dropped + port.dropped.named().iter().map(|(_, count)| count).sum::<u64>(),
            })
        };
        BridgeStatus {
            interface: self.config.name.clone(),
            netns: self.config.netns.clone(),
            pid: std::process::id(),
            kind: "network",
            by_rule: true,
            state: if linked == 0 { State::Waiting } else { State::Linked },
            reason: format!("{linked} of {} ports linked", ports.len()),
            mac: link.as_ref().map_or(self.config.mac, |link| link.mac),
            mtu: link.map_or(0, |link| link.mtu),
            ports: ports_told.collect(),
            sent: sum(&mut ports.iter().map(|port| &port.sent)),
            received: sum(&mut ports.iter().map(|port| &port.received)),
        }
    }

    /// Removes it, wherever it was renamed to.
    ///
    /// # Errors
    /// The kernel does not let it go.
    pub fn remove(self) -> Result<()> {
        match self.netlink.link(self.index) {
            Ok(link) if link.alias == self.config.label() => self.netlink.delete_link(self.index).os("RTM_DELLINK")?,
            // Somebody removed it, or wrote on it that it is theirs.
            _ => {}
        }
        Ok(())
    }
}

fn make(netlink: &Netlink, config: &BridgeConfig) -> Result<i32> {
    let name = &config.name;
    netlink.add_bridge(name, config.mac).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::OPNOTSUPP | Errno::NOSYS) => Error::NoBridges(error),
        Some(Errno::PERM) => Error::NotPermitted(name.clone()),
        Some(Errno::EXIST) => Error::NotOurs(name.clone()),
        _ => crate::error::FailedCall { call: "RTM_NEWLINK", source: error }.into(),
    })?;
    let link = netlink.find(name).os("RTM_GETLINK")?.ok_or_else(|| Error::Removed(name.clone()))?;
    // Any peer could say that it is the way to everywhere.
    write_setting("ipv6", name, "accept_ra", "0").or_else(none_is_fine)?;
    if let Some(ip) = config.ip {
        ignore_routes_without_carrier(name, ip.own)?;
        if ip.own.is_ipv4() && ip.reached.1 == 32 {
            loosen_source_filter(name)?;
        }
    }
    netlink.set_up(link.index).os("RTM_NEWLINK")?;
    give_ip(netlink, link.index, config)?;
    Ok(link.index)
}

/// Gives it its address of IP, if it is to have one. One that it has stays.
fn give_ip(netlink: &Netlink, index: i32, config: &BridgeConfig) -> Result<()> {
    let Some(IpConfig { own, reached: (reached, bits) }) = config.ip else { return Ok(()) };
    let failed = |source| Error::Ip { name: config.name.clone(), address: own, source };
    netlink.add_address(index, own, reached, bits).map_err(failed)
}

/// Where each peer has a route of its own, by its port, what it sends comes in by the bridge nevertheless. A kernel that takes
/// packets only from where it would send to is asked to take them from where anybody is reached.
fn loosen_source_filter(name: &str) -> Result<()> {
    let is_strict = |interface: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        fs::read_to_string(path).is_ok_and(|value| value.trim() == "1")
    };
    if is_strict("all") || is_strict(name) { write_setting("ipv4", name, "rp_filter", "2") } else { Ok(()) }
}

/// Removes what processes that died have left in a namespace, but for the names that are wanted still. Returns what it removed.
///
/// # Errors
/// The namespace is not there, or the kernel does not say what is in it.
pub fn remove_stale_bridges(netns: Option<&str>, wanted: &[&str]) -> Result<Vec<String>> {
    enter_and(netns, || {
        // That of this thread, and so of its namespace.
        let path = "/proc/thread-self/net/dev";
        let all = fs::read_to_string(path).os("read /proc/thread-self/net/dev")?;
        let netlink = Netlink::open().os("socket")?;
        let mut removed = Vec::new();
        for name in all.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim()) {
            if wanted.contains(&name) {
                continue;
            }
            // What is no Ethernet interface is none of these.
            let Ok(Some(link)) = netlink.find(name) else { continue };
            if link.kind == "bridge" && link.alias.starts_with(LABEL) {
                netlink.delete_link(link.index).os("RTM_DELLINK")?;
                removed.push(name.to_owned());
            }
        }
        Ok(removed)
    })
}

/// The address of the one interface of a network, and that of a port. With a prefix the network is behind the one. Without one each
/// peer is behind its port, so that the kernel takes another way to a peer whose port has no carrier (N-13).
#[must_use]
pub fn split_ip(own: IpAddr, prefix: Option<u8>, peer: Option<IpAddr>) -> (IpConfig, Option<IpConfig>) {
    let port = prefix.is_none().then(|| peer.map(|peer| IpConfig::new(own, None, Some(peer)))).flatten();
    (IpConfig::new(own, prefix, None), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> BridgeConfig {
        let own = "10.9.0.1".parse().unwrap();
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        BridgeConfig { name: "lan".into(), netns: None, mac, ip: Some(split_ip(own, Some(24), None).0) }
    }

    #[test]
    fn n14_interface_of_another_is_none_of_ours() {
        let link = |kind: &str, alias: &str, mac| {
            let (kind, alias) = (kind.to_owned(), alias.to_owned());
            Link { index: 5, mac, mtu: 1500, up: true, has_carrier: false, master: 0, kind, alias }
        };
        let (own, other) = (config().mac, Mac([2, 0, 0, 0, 0, 9]));
        assert!(config().is_of(&link("bridge", &config().label(), own)));
        // Of a rule that was another, and one whose maker died before it was finished.
        assert!(config().is_of(&link("bridge", "tombolo network lan 02:00:00:00:00:09", other)));
        assert!(config().is_of(&link("bridge", "", own)));
        for (kind, alias, mac) in
            [("bridge", "", other), ("bridge", "my own", own), ("dummy", "", own), ("", LABEL, own)]
        {
            assert!(!config().is_of(&link(kind, alias, mac)), "{kind} {alias} {mac}");
        }
    }

    #[test]
    fn n13_n14_network_is_behind_the_bridge_or_each_peer_behind_its_port() {
        let [own, peer]: [IpAddr; 2] = ["10.9.0.1", "10.9.0.2"].map(|ip| ip.parse().unwrap());
        let (whole, port) = split_ip(own, Some(24), Some(peer));
        assert_eq!((whole.reached, port), ((own, 24), None));
        let (whole, port) = split_ip(own, None, Some(peer));
        assert_eq!((whole.reached, port.unwrap().reached), ((own, 32), (peer, 32)));
        assert_eq!(split_ip(own, None, None).1, None);
    }

    #[test]
    fn n14_label_says_all_that_would_make_it_another() {
        let base = config().label();
        let other_ip = BridgeConfig { ip: None, ..config() };
        let other_mac = BridgeConfig { mac: Mac([2, 0, 0, 0, 0, 2]), ..config() };
        assert_eq!(base, "tombolo network lan 02:00:00:00:00:01 10.9.0.1/24");
        assert!(base != other_ip.label() && base != other_mac.label());
    }
}
