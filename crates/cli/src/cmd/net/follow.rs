// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net follow`: keeps the interfaces that the host's rules give this machine (B-28).
//!
//! Asks the broker of this kernel once a second. An answer that is missing changes nothing: interfaces outlive both
//! brokers, as their channels do.

use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use tombolo_control::{Message, NetRole, Seen};
use tombolo_inspect::{Broker, programs_socket};
use tombolo_net::{Config, Control, Engine, IpConfig, Mac, Member, NicConfig, Place, PortConfig, RING_DEFAULT};

use super::{
    EngineName, default_mac,
    networks::{Form, Networks, ip, prefix_of},
};
use crate::{
    failure::{Failure, Result, print_line},
    signals::{Signals, await_any},
};

/// Time between two questions to the broker, and between two attempts to make what is missing.
const EACH: Duration = Duration::from_secs(1);
/// MTU of a network whose rule gives none.
const MTU_DEFAULT: u32 = 1500;
/// Time that the broker has for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub struct FollowArgs {
    /// Make them in this network namespace: a name of `ip netns`, or a path
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,
    /// Who moves their frames
    #[arg(long, value_name = "WHO", value_enum, default_value = "auto")]
    engine: EngineName,
    /// In networks of more than two names, an interface for each peer and not one whose ports these are
    #[arg(long)]
    plain: bool,
}

/// Interface that is wanted.
struct Interface {
    config: Config,
    /// Engine and control socket, once the interface could be made.
    running: Option<(Engine, Control)>,
    /// Reason why it could not be made the last time.
    complaint: String,
}

struct Follower<'a> {
    args: &'a FollowArgs,
    broker: Option<Broker>,
    /// Reason why the broker could not be asked the last time.
    complaint: String,
    /// Name of this machine.
    own: String,
    networks: Networks,
    /// Rows of the last answer.
    rows: Option<Vec<Message>>,
    interfaces: BTreeMap<String, Interface>,
}

impl FollowArgs {
    pub fn run(&self, folder: &Path) -> Result<()> {
        let signals = Signals::hold()?;
        let networks = Networks::new(self.netns.clone(), self.plain, folder.into());
        let (complaint, interfaces) = (String::new(), BTreeMap::new());
        let mut follower =
            Follower { args: self, broker: None, complaint, own: String::new(), networks, rows: None, interfaces };
        while signals.caught().is_none() {
            follower.rows = follower.ask_broker().or(follower.rows.take());
            follower.keep_all(folder);
            let until = Instant::now() + EACH;
            while signals.caught().is_none() && follower.serve(&signals, until)? {}
        }
        follower.change(Vec::new());
        follower.networks.end();
        Ok(())
    }
}

impl Follower<'_> {
    /// Returns the rows that the broker wants, or `None` if it does not answer.
    fn ask_broker(&mut self) -> Option<Vec<Message>> {
        let rows =
            self.broker.take().map_or_else(|| Broker::connect(&programs_socket(), PATIENCE), Ok).and_then(|broker| {
                let rows = ask_rows(&broker)?;
                Ok((broker, rows))
            });
        match rows {
            Ok((broker, rows)) => {
                self.own = broker.domain().to_string();
                (self.broker, self.complaint) = (Some(broker), String::new());
                Some(rows)
            }
            Err(error) => {
                let complaint = Failure::from(error).chain();
                if self.complaint != complaint {
                    print_line(&format!("which interfaces there are to be is not known: {complaint}"));
                    self.complaint = complaint;
                }
                None
            }
        }
    }

    /// Makes what is wanted and missing, and ends the rest; does nothing until the broker has answered once.
    fn keep_all(&mut self, folder: &Path) {
        let Some(rows) = self.rows.clone() else { return };
        // A port whose network changes ends before the network does, and begins again after it.
        let before = self.networks.wanted();
        let after = Networks::wanted_by(&rows, &self.args.netns);
        if before != after {
            let stays = |row: &Message| match row {
                Message::Net { network, .. } => {
                    let name = network.as_str();
                    before.get(name) == after.get(name)
                }
                _ => false,
            };
            let staying = rows.iter().filter(|row| stays(row)).filter_map(|row| self.config(row)).collect();
            self.change(staying);
        }
        self.networks.change(&rows);
        let wanted = rows.iter().filter_map(|row| self.config(row)).collect();
        self.change(wanted);
        for interface in self.interfaces.values_mut() {
            let network = interface.config.member.as_ref().map(|member| member.network.as_str());
            if network.is_none_or(|network| self.networks.form(network).is_some()) {
                interface.begin(folder);
                interface.keep_port();
            }
        }
    }

    /// Returns the interface that a row asks for.
    fn config(&self, row: &Message) -> Option<Config> {
        let Message::Net {
            interface, peer, service, role, mtu, own, prefix, theirs, network, own_mac, their_mac, ..
        } = row
        else {
            return None;
        };
        let place = match role {
            NetRole::Listen => Place::Listen(format!("vm:{}/{service}", self.own)),
            NetRole::Connect => Place::Connect(format!("vm:{peer}/{service}")),
        };
        let name = interface.to_string();
        let mtu = Some(u32::from(*mtu)).filter(|mtu| *mtu != 0);
        let (network, mac) = (network.to_string(), Mac(*their_mac));
        let port = match self.networks.form(&network) {
            Some(Form::Plain) => None,
            // A port whose network does not exist yet waits for it.
            _ => {
                let peer_ip = ip(*theirs).filter(|_| *prefix != 0);
                Some(PortConfig { bridge: network.clone(), peer: mac, peer_ip }).filter(|_| !network.is_empty())
            }
        };
        let ip = match &port {
            None if network.is_empty() => ip_config(*own, *prefix, *theirs),
            // The network is behind the one interface whose port this is.
            Some(_) if *prefix != 0 => None,
            // Each peer is behind an interface of its own.
            _ => ip_config(*own, 0, *theirs),
        };
        let nic = NicConfig {
            netns: self.args.netns.clone(),
            mac: Some(Mac(*own_mac)).filter(|mac| mac.is_unicast()),
            default_mac: default_mac(&place, &name),
            mtu,
            ip,
            port,
            name,
        };
        let member =
            Some(Member { network, mac, mtu: mtu.unwrap_or(MTU_DEFAULT) }).filter(|member| !member.network.is_empty());
        let engine = self.args.engine.into();
        Some(Config { nic, engine, place, any_source: false, ring: RING_DEFAULT, by_rule: true, member })
    }

    /// Ends interfaces that are not wanted, or wanted differently. New ones begin later.
    fn change(&mut self, wanted: Vec<Config>) {
        let unwanted = |it: &Interface| !wanted.contains(&it.config);
        let names: Vec<String> =
            self.interfaces.iter().filter(|(_, it)| unwanted(it)).map(|(name, _)| name.clone()).collect();
        for name in names {
            if let Some(interface) = self.interfaces.remove(&name) {
                print_line(&format!("{name}: no rule of the host's wants it so any more"));
                interface.end();
            }
        }
        for config in wanted {
            let fresh = || Interface { config: config.clone(), running: None, complaint: String::new() };
            self.interfaces.entry(config.nic.name.clone()).or_insert_with(fresh);
        }
    }

    /// Answers requests about interfaces. Returns `false` once the time is over or an interface has ended.
    fn serve(&mut self, signals: &Signals, until: Instant) -> Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let running: Vec<_> = self.interfaces.values().filter_map(|it| it.running.as_ref()).collect();
        let mut fds = vec![signals.fd()];
        fds.extend(running.iter().flat_map(|(engine, control)| [engine.ended(), control.as_fd()]));
        fds.extend(self.networks.fds());
        let ready = await_any(&fds, Some(left))?;
        let of_interfaces = &ready[1..=running.len() * 2];
        for ((engine, control), ready) in running.iter().zip(of_interfaces.chunks(2)) {
            if ready[1] {
                // A request to end the interface is not acted on: `tombolo net down` has refused it already, because a
                // rule wants it.
                control.answer(&engine.status());
            }
        }
        if ready[1 + of_interfaces.len()..].contains(&true) {
            self.networks.answer(|| running.iter().map(|(engine, _)| engine.status()).collect());
        }
        let ended = of_interfaces.chunks(2).any(|ready| ready[0]);
        self.interfaces.values_mut().for_each(Interface::notice_end);
        // An interface that ended is made again in the next turn, so that a failing one is not retried without a pause.
        Ok(!ended && !left.is_zero())
    }
}

impl Interface {
    /// Makes the interface if it does not exist.
    fn begin(&mut self, folder: &Path) {
        if self.running.is_some() {
            return;
        }
        let name = &self.config.nic.name;
        let begun = Control::open(folder, name)
            .and_then(|control| Ok((Engine::start(self.config.clone(), Box::new(print_line))?, control)));
        match begun {
            Ok(running) => (self.running, self.complaint) = (Some(running), String::new()),
            Err(error) => {
                let complaint = Failure::from(error).chain();
                if self.complaint != complaint {
                    print_line(&format!("{name}: {complaint}"));
                    self.complaint = complaint;
                }
            }
        }
    }

    /// Ensures that the interface is the port that it must be.
    fn keep_port(&mut self) {
        let Some((engine, _)) = &self.running else { return };
        match engine.keep_port() {
            Ok(false) => self.complaint = String::new(),
            Ok(true) => print_line(&format!("{}: it was no port any more, and is one again", self.config.nic.name)),
            Err(error) => {
                let complaint = Failure::from(error).chain();
                if self.complaint != complaint {
                    print_line(&format!("{}: {complaint}", self.config.nic.name));
                    self.complaint = complaint;
                }
            }
        }
    }

    /// Removes an engine that ended by itself.
    fn notice_end(&mut self) {
        let is_over = |(engine, _): &mut (Engine, Control)| {
            await_any(&[engine.ended()], Some(Duration::ZERO)).is_ok_and(|ready| ready[0])
        };
        if let Some((engine, _)) = self.running.take_if(is_over)
            && let Err(error) = engine.stop()
        {
            print_line(&format!("{}: {}", self.config.nic.name, Failure::from(error).chain()));
        }
    }

    fn end(self) {
        if let Some((engine, _control)) = self.running
            && let Err(error) = engine.stop()
        {
            print_line(&format!("{}: {}", self.config.nic.name, Failure::from(error).chain()));
        }
    }
}

/// Returns all interfaces that this domain must have.
fn ask_rows(broker: &Broker) -> std::result::Result<Vec<Message>, tombolo_inspect::Error> {
    let mut all = Vec::new();
    broker.gather_rows(Seen::Nets, |row| all.push(row))?;
    Ok(all)
}

/// Converts an address as the broker sends it: all zeros for none, IPv4 mapped into IPv6.
fn ip_config(own: [u8; 16], prefix: u8, theirs: [u8; 16]) -> Option<IpConfig> {
    let own = ip(own)?;
    Some(IpConfig::new(own, prefix_of(prefix, own), ip(theirs)))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn b28_addresses_come_mapped_and_reach_a_network_or_the_peer() {
        let mapped = |last| std::net::Ipv4Addr::new(10, 9, 0, last).to_ipv6_mapped().octets();
        let [one, two]: [IpAddr; 2] = ["10.9.0.1", "10.9.0.2"].map(|ip| ip.parse().unwrap());
        assert_eq!(ip_config(mapped(1), 120, mapped(2)), Some(IpConfig { own: one, reached: (one, 24) }));
        assert_eq!(ip_config(mapped(1), 0, mapped(2)), Some(IpConfig { own: one, reached: (two, 32) }));
        assert_eq!(ip_config(mapped(1), 0, [0; 16]), Some(IpConfig { own: one, reached: (one, 32) }));
        assert_eq!(ip_config([0; 16], 0, mapped(2)), None);
        let (fd, peer) = ([0xfd; 16], [0xfe; 16]);
        assert_eq!(ip_config(fd, 0, peer).unwrap().reached, (IpAddr::from(peer), 128));
        assert_eq!(ip_config(fd, 64, peer).unwrap().reached, (IpAddr::from(fd), 64));
    }
}
