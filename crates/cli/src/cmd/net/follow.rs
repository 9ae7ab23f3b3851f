// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net follow`: the interfaces that the host's rules give this machine (B-28).
//!
//! The broker of this kernel is asked once a second. What it says not, or cannot say, changes nothing: interfaces outlive both
//! brokers, as their channels do.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use tombolo_control::{Message, NetRole, Seen};
use tombolo_inspect::{Broker, programs_socket};
use tombolo_net::{Config, Control, Engine, IpConfig, NicConfig, Place, RING_DEFAULT};

use super::{EngineName, default_mac};
use crate::{
    failure::{Failure, Result, print_line},
    signals::{Signals, await_any},
};

/// How often the broker is asked, and what is missing is tried again.
const EACH: Duration = Duration::from_secs(1);
/// How long the broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub struct FollowArgs {
    /// Make them in this network namespace: a name of `ip netns`, or a path
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,
    /// Who moves their frames
    #[arg(long, value_name = "WHO", value_enum, default_value = "auto")]
    engine: EngineName,
}

/// An interface that is wanted.
struct Interface {
    config: Config,
    /// What it runs in, and how it is found, once it could be made.
    running: Option<(Engine, Control)>,
    /// Why it could not be made the last time.
    complaint: String,
}

struct Follower<'a> {
    args: &'a FollowArgs,
    broker: Option<Broker>,
    /// Why the broker could not be asked the last time.
    complaint: String,
    interfaces: BTreeMap<String, Interface>,
}

impl FollowArgs {
    pub fn run(&self, folder: &Path) -> Result<()> {
        let signals = Signals::hold()?;
        let (broker, complaint, interfaces) = (None, String::new(), BTreeMap::new());
        let mut follower = Follower { args: self, broker, complaint, interfaces };
        while signals.caught().is_none() {
            if let Some(wanted) = follower.ask() {
                follower.change(wanted);
            }
            follower.interfaces.values_mut().for_each(|it| it.begin(folder));
            let until = Instant::now() + EACH;
            while signals.caught().is_none() && follower.serve(&signals, until)? {}
        }
        follower.change(Vec::new());
        Ok(())
    }
}

impl Follower<'_> {
    /// What is wanted, if the broker says so.
    fn ask(&mut self) -> Option<Vec<Config>> {
        let rows =
            self.broker.take().map_or_else(|| Broker::connect(&programs_socket(), PATIENCE), Ok).and_then(|broker| {
                let rows = ask_rows(&broker)?;
                Ok((broker, rows))
            });
        match rows {
            Ok((broker, rows)) => {
                let own = broker.domain().to_string();
                (self.broker, self.complaint) = (Some(broker), String::new());
                Some(rows.into_iter().filter_map(|row| self.config(&own, row)).collect())
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

    /// What a row wants in the domain `own`.
    fn config(&self, own: &str, row: Message) -> Option<Config> {
        let Message::Net { interface, peer, service, role, mtu, own: address, prefix, theirs, .. } = row else {
            return None;
        };
        let place = match role {
            NetRole::Listen => Place::Listen(format!("vm:{own}/{service}")),
            NetRole::Connect => Place::Connect(format!("vm:{peer}/{service}")),
        };
        let name = interface.to_string();
        let nic = NicConfig {
            netns: self.args.netns.clone(),
            mac: None,
            default_mac: default_mac(&place, &name),
            mtu: Some(mtu.into()).filter(|mtu| *mtu != 0),
            ip: ip_config(address, prefix, theirs),
            name,
        };
        let engine = self.args.engine.into();
        Some(Config { nic, engine, place, any_source: false, ring: RING_DEFAULT, by_rule: true })
    }

    /// Ends what is not wanted, or not so; what is new begins later.
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

    /// Answers who asks about an interface. `false` once the time is over.
    fn serve(&mut self, signals: &Signals, until: Instant) -> Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let running: Vec<_> = self.interfaces.values().filter_map(|it| it.running.as_ref()).collect();
        let mut fds = vec![signals.fd()];
        fds.extend(running.iter().flat_map(|(engine, control)| [engine.ended(), control.as_fd()]));
        let ready = await_any(&fds, Some(left))?;
        for ((engine, control), ready) in running.iter().zip(ready[1..].chunks(2)) {
            if ready[1] {
                // Who wants it to end is told before that a rule wants it.
                control.answer(&engine.status());
            }
        }
        let ended = ready[1..].chunks(2).any(|ready| ready[0]);
        self.interfaces.values_mut().for_each(Interface::notice_end);
        // One that ended is made again with the next turn, and not at once for ever.
        Ok(!ended && !left.is_zero())
    }
}

impl Interface {
    /// Makes it, if it is not there.
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

    /// One that ended by itself is there no more.
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

/// All interfaces that this domain is to have.
fn ask_rows(broker: &Broker) -> std::result::Result<Vec<Message>, tombolo_inspect::Error> {
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let rows = broker.ask(Message::Look { at: Seen::Nets, after })?;
        let last = rows.iter().filter_map(|row| if let Message::Net { at, .. } = row { Some(*at) } else { None }).max();
        let Some(last) = last.filter(|last| *last > after) else { return Ok(all) };
        after = last;
        all.extend(rows);
    }
}

/// An address as the broker says it: zeros are none, and IPv4 is mapped.
fn ip_config(own: [u8; 16], prefix: u8, theirs: [u8; 16]) -> Option<IpConfig> {
    let ip =
        |bytes: [u8; 16]| Some(Ipv6Addr::from(bytes)).filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_canonical());
    let own: IpAddr = ip(own)?;
    let prefix = match (prefix, own) {
        (0, _) => None,
        (bits, IpAddr::V4(_)) => bits.checked_sub(96),
        (bits, IpAddr::V6(_)) => Some(bits),
    };
    Some(IpConfig::new(own, prefix, ip(theirs)))
}

#[cfg(test)]
mod tests {
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
