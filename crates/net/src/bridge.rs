// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manages the one interface of a network of many: a bridge of the kernel, each of whose ports leads to one peer
//! (N-14).

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

/// Beginning of the alias of each such bridge, before its configuration.
const LABEL: &str = "tombolo network";

/// Configuration of the bridge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BridgeConfig {
    /// Name of the bridge.
    pub name: String,
    /// Network namespace in which to make it: a name as `ip netns` knows it, or a path.
    pub netns: Option<String>,
    /// Hardware address of the bridge and of each of its ports.
    pub mac: Mac,
    /// Its IP address, if it is to get one.
    pub ip: Option<IpConfig>,
}

impl BridgeConfig {
    /// Returns the alias by which another process recognizes the bridge.
    fn label(&self) -> String {
        let ip = self.ip.map(|ip| format!(" {}/{}", ip.own, ip.reached.1)).unwrap_or_default();
        format!("{LABEL} {} {}{ip}", self.name, self.mac)
    }

    /// Returns whether an interface was made for this purpose, now or by a process that died.
    fn is_of(&self, link: &Link) -> bool {
        let is_unfinished = link.alias.is_empty() && link.mac == self.mac;
        link.kind == "bridge" && (link.alias.starts_with(LABEL) || is_unfinished)
    }
}

/// The bridge. It outlives this value and this process, so that a restarted process finds it.
#[derive(Debug)]
pub struct Bridge {
    config: BridgeConfig,
    netlink: Netlink,
    index: i32,
}

/// Status of a network.
#[derive(Clone, Debug, Serialize)]
pub struct BridgeStatus {
    /// Name of the bridge.
    pub interface: String,
    /// Network namespace in which it was made, if one was named.
    pub netns: Option<String>,
    /// Process that manages it.
    pub pid: u32,
    /// `network`: its links are those of its ports.
    pub kind: &'static str,
    /// Whether a rule of the host requires it, which is always so.
    pub by_rule: bool,
    /// Linked while any port is linked.
    pub state: State,
    /// Number of linked ports, in words.
    pub reason: String,
    /// Hardware address of the bridge.
    pub mac: Mac,
    /// MTU of the bridge.
    pub mtu: u32,
    /// Its ports, each of which has a status of its own.
    pub ports: Vec<PortStatus>,
    /// Frames sent to all peers.
    pub sent: Moved,
    /// Frames received from all peers.
    pub received: Moved,
}

/// Status of a port, as part of its network's.
#[derive(Clone, Debug, Serialize)]
pub struct PortStatus {
    /// Name of the port's interface.
    pub interface: String,
    /// The peer behind it, while there is a link.
    pub peer: Option<String>,
    /// Whether there is a link.
    pub state: State,
}

/// Traffic of all current ports.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Moved {
    /// Number of frames.
    pub frames: u64,
    /// Number of bytes in these frames.
    pub bytes: u64,
    /// Number of frames dropped.
    pub dropped: u64,
}

impl Bridge {
    /// Makes the bridge, or takes over the one that a process which died had made.
    ///
    /// # Errors
    /// The name is in use by another interface, the kernel makes no bridges, or a privilege is missing.
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
        // Last, because a bridge without the label counts as unfinished.
        netlink.set_alias(index, &label).os("RTM_NEWLINK")?;
        Ok(Self { config: config.clone(), netlink, index })
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &BridgeConfig {
        &self.config
    }

    /// Restores the bridge's hardware address, which peers expect, and its IP address: the kernel forgets IPv6
    /// addresses when an interface is switched off. Returns `false` if the bridge is gone.
    ///
    /// # Errors
    /// The kernel does not answer, or refuses an address.
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

    /// Returns the status of the bridge, given that of its ports.
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

    /// Removes the bridge, also if it was renamed.
    ///
    /// # Errors
    /// The kernel does not remove it.
    pub fn remove(self) -> Result<()> {
        match self.netlink.link(self.index) {
            Ok(link) if link.alias == self.config.label() => self.netlink.delete_link(self.index).os("RTM_DELLINK")?,
            // It was removed, or its alias says that it now belongs to somebody else.
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
    // With router advertisements any peer could claim to be the default route.
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

/// Gives the bridge its IP address, if it is to have one. An existing address stays.
fn give_ip(netlink: &Netlink, index: i32, config: &BridgeConfig) -> Result<()> {
    let Some(IpConfig { own, reached: (reached, bits) }) = config.ip else { return Ok(()) };
    let failed = |source| Error::Ip { name: config.name.clone(), address: own, source };
    netlink.add_address(index, own, reached, bits).map_err(failed)
}

/// Makes the kernel accept packets from any reachable source, if it would accept them only from the interface through
/// which it would answer. Needed if each peer has a route through its port, because a peer's packets arrive at the
/// bridge nevertheless.
fn loosen_source_filter(name: &str) -> Result<()> {
    let is_strict = |interface: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        fs::read_to_string(path).is_ok_and(|value| value.trim() == "1")
    };
    if is_strict("all") || is_strict(name) { write_setting("ipv4", name, "rp_filter", "2") } else { Ok(()) }
}

/// Removes the bridges that processes which died have left in a namespace, except the wanted names. Returns the removed
/// names.
///
/// # Errors
/// The namespace is not there, or the kernel does not list its interfaces.
pub fn remove_stale_bridges(netns: Option<&str>, wanted: &[&str]) -> Result<Vec<String>> {
    enter_and(netns, || {
        // The file shows this thread's namespace.
        let path = "/proc/thread-self/net/dev";
        let all = fs::read_to_string(path).os("read /proc/thread-self/net/dev")?;
        let netlink = Netlink::open().os("socket")?;
        let mut removed = Vec::new();
        for name in all.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim()) {
            if wanted.contains(&name) {
                continue;
            }
            // An interface without an Ethernet address is no such bridge.
            let Ok(Some(link)) = netlink.find(name) else { continue };
            if link.kind == "bridge" && link.alias.starts_with(LABEL) {
                netlink.delete_link(link.index).os("RTM_DELLINK")?;
                removed.push(name.to_owned());
            }
        }
        Ok(removed)
    })
}

/// Returns the IP address of a network's bridge, and that of a port. With a prefix the whole network is behind the
/// bridge. Without one each peer is behind its port, so that the kernel uses another route to a peer whose port has no
/// carrier (N-13).
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
        // A bridge of a rule that was another, and one whose maker died before it was finished.
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
