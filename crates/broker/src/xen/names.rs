// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker in dom0: tells Xen domains each other's names, as the rules allow, and which of them are paused (X-20 to
//!
//!
//! Runs in its own thread beside the rest of the broker, because XenStore and the toolstack may be slow.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex, MutexGuard},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tombolo_control::Name;
use tombolo_domain_xen::{State, View, Views, XenHost};
use tombolo_os::{event, lock::lock};

use crate::{config::Config, panics};

/// Interval between two questions which domains are paused, as long as any domain may want to know.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Time that the toolstack may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time after which XenStore is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// Returns what each domain is told, for the running domains that the configuration names and for dom0 under the host's
/// name.
#[must_use]
pub fn views(config: &Config, domains: &BTreeMap<u16, String>, states: &BTreeMap<u16, State>) -> Views {
    let Some(xen) = &config.xen else { return Views::new() };
    let mut named: BTreeMap<u16, Name> = BTreeMap::from([(0, config.host.clone())]);
    for (id, name) in domains.iter().filter(|(id, _)| **id != 0) {
        // If two domains have the same name, neither is used.
        let alone = domains.values().filter(|other| *other == name).count() == 1;
        if let Some(name) = name.parse().ok().filter(|name| alone && xen.domains.contains(name)) {
            named.insert(*id, name);
        }
    }
    let of = |reader: &Name| {
        let others = named.iter().filter_map(|(id, name)| {
            let ours: Vec<_> = config.services(name, reader).cloned().collect();
            let theirs: Vec<_> = config.services(reader, name).cloned().collect();
            let state = states.get(id).copied().unwrap_or_default();
            let view = View { name: name.clone(), state, ours, theirs };
            (!view.ours.is_empty() || !view.theirs.is_empty()).then_some((*id, view))
        });
        others.collect::<BTreeMap<_, _>>()
    };
    named.iter().map(|(id, name)| (*id, (name.clone(), of(name)))).collect()
}

/// Parses what `xl list` prints and returns which domains run and which are paused. Columns: name, number, memory,
/// processors, state, time. A name may contain blanks.
#[must_use]
pub fn states(text: &str) -> BTreeMap<u16, State> {
    let state = |line: &str| {
        let mut words = line.rsplit(' ').filter(|word| !word.is_empty());
        let (_time, flags, _processors, _memory, id) =
            (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
        let flags: &[u8; 6] = flags.as_bytes().try_into().ok()?;
        let state = match flags {
            [_, _, b'p', ..] => State::Paused,
            // Not shut down, crashed or dying.
            [.., b'-', b'-', b'-'] => State::Running,
            _ => State::Unknown,
        };
        Some((id.parse().ok()?, state))
    };
    text.lines().filter_map(state).collect()
}

/// Asks the toolstack for the states of all domains.
fn ask(xl: &Path) -> io::Result<BTreeMap<u16, State>> {
    let mut child =
        Command::new(xl).arg("list").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let said = read_to_end_until(child.stdout.as_mut().expect("it is a pipe"), Instant::now() + PATIENCE);
    if said.is_err() {
        let _ = child.kill();
    }
    let status = child.wait()?;
    if !status.success() {
        return Err(said.err().unwrap_or_else(|| io::Error::other(format!("it ended with {status}"))));
    }
    Ok(states(&String::from_utf8_lossy(&said?)))
}

/// Reads all that comes out of a pipe until its end.
fn read_to_end_until(pipe: &mut (impl Read + AsFd), deadline: Instant) -> io::Result<Vec<u8>> {
    let (mut said, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        if !wait(&mut [PollFd::new(pipe, PollFlags::IN)], Some(deadline.saturating_duration_since(Instant::now())))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match pipe.read(&mut buffer)? {
            0 => return Ok(said),
            len => said.extend_from_slice(&buffer[..len]),
        }
    }
}

/// Returns whether one of `fds` became ready in time.
fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<bool> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match rustix::event::poll(fds, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Orders for the thread.
#[derive(Debug)]
struct Orders {
    /// The configuration; `None` tells the thread to end.
    config: Mutex<Option<Config>>,
    /// Doorbell that is notified when the configuration changed.
    doorbell: OwnedFd,
}

impl Orders {
    fn config(&self) -> MutexGuard<'_, Option<Config>> {
        lock(&self.config)
    }

    fn give(&self, config: Option<Config>) {
        *self.config() = config;
        event::raise(&self.doorbell);
    }
}

/// The thread, while the configuration has a section for Xen.
#[derive(Debug, Default)]
pub struct XenThread(Option<(Arc<Orders>, JoinHandle<()>)>);

impl XenThread {
    /// Applies `config` from now on.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn reconcile(&mut self, config: &Config) -> io::Result<()> {
        self.settle_on(config, XenHost::new)
    }

    /// Does the same in a dom0 that `begin` finds.
    ///
    /// # Errors
    /// As [`reconcile`](Self::reconcile).
    pub fn settle_on<E: std::error::Error>(
        &mut self,
        config: &Config,
        begin: impl Fn() -> Result<XenHost, E> + Send + 'static,
    ) -> io::Result<()> {
        match (&self.0, &config.xen) {
            (Some((orders, _)), Some(_)) => orders.give(Some(config.clone())),
            (_, None) => self.end(),
            (None, Some(_)) => {
                let doorbell = event::eventfd(0)?;
                let orders = Arc::new(Orders { config: Mutex::new(Some(config.clone())), doorbell });
                let given = Arc::clone(&orders);
                let thread = thread::Builder::new().name("tombolod-xen".into()).spawn(move || run(&given, begin))?;
                self.0 = Some((orders, thread));
            }
        }
        Ok(())
    }

    fn end(&mut self) {
        if let Some((orders, thread)) = self.0.take() {
            orders.give(None);
            let _ = thread.join();
        }
    }
}

impl Drop for XenThread {
    fn drop(&mut self) {
        self.end();
    }
}

fn run<E: std::error::Error>(orders: &Orders, begin: impl Fn() -> Result<XenHost, E>) {
    let mut trouble = String::new();
    loop {
        let serves = || {
            let served = begin().map_err(|error| why(&error));
            Ok(served.and_then(|mut host| serve(orders, &mut host).map_err(|error| why(&*error))))
        };
        let why = match panics::catch_panic(serves) {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(panic) => panic.to_string(),
        };
        // Logged once, however often the attempt is repeated.
        if why != trouble {
            tracing::warn!("domains of Xen's are told nothing: {why}");
            trouble = why;
        }
        let _ = wait(&mut [PollFd::new(&orders.doorbell, PollFlags::IN)], Some(AGAIN));
        let _ = rustix::io::read(&orders.doorbell, &mut [0; 8]);
        if orders.config().is_none() {
            return;
        }
    }
}

/// Formats an error with its source.
fn why(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Serves until the thread is to end. Published names stay, because they are useful without a broker too. Liveness
/// stays as well, but then no domain believes it.
fn serve(orders: &Orders, host: &mut XenHost) -> Result<(), Box<dyn std::error::Error>> {
    let mut states = BTreeMap::new();
    let (mut asked, mut trouble) = (None, String::new());
    let mut domains = host.domains()?;
    tracing::info!("domains of Xen's are told names");
    loop {
        let Some(config) = orders.config().clone() else { return Ok(()) };
        host.publish_views(&views(&config, &domains, &states))?;
        // The last check before the wait: a watch that fires while an answer is awaited does not make the descriptor
        // readable.
        if host.changed()? {
            domains = host.domains()?;
            continue;
        }
        let left = |asked: Instant| ASK_EVERY.saturating_sub(asked.elapsed());
        let asks = host.has_listeners();
        let limit = asks.then(|| asked.map_or(Duration::ZERO, left));
        let fd = host.fd();
        wait(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN), PollFd::new(&orders.doorbell, PollFlags::IN)], limit)?;
        let _ = rustix::io::read(&orders.doorbell, &mut [0; 8]);
        if asks && asked.is_none_or(|asked| left(asked).is_zero()) {
            let xl = config.xen.map(|xen| xen.xl).unwrap_or_default();
            let (found, now) = match ask(&xl) {
                Ok(found) => (found, String::new()),
                Err(error) => {
                    (BTreeMap::new(), format!("nobody tells who is paused: `{} list`: {error}", xl.display()))
                }
            };
            if now != trouble && !now.is_empty() {
                tracing::warn!("{now}");
            }
            (states, trouble, asked) = (found, now, Some(Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[host]\nname = \"base\"\n[xen]\ndomains = [\"left\", \"right\", \"third\"]\n\
        [[allow]]\nfrom = \"left\"\nto = \"right\"\nservice = \"file*\"\n\
        [[allow]]\nfrom = \"*\"\nto = \"base\"\nservice = \"log\"\n";

    fn config() -> Config {
        Config::parse(Path::new("t.toml"), CONFIG).expect("sound")
    }

    fn domains(all: &[(u16, &str)]) -> BTreeMap<u16, String> {
        all.iter().map(|(id, name)| (*id, (*name).to_owned())).collect()
    }

    #[test]
    fn x20_domain_is_told_of_those_with_which_a_rule_lets_it_speak() {
        let there = domains(&[(0, "Domain-0"), (3, "left"), (4, "right"), (9, "stranger")]);
        let all = views(&config(), &there, &BTreeMap::from([(4, State::Paused)]));
        let view = |id: u16| all[&id].1.iter().map(|(id, view)| (*id, view.name.as_str())).collect::<Vec<_>>();
        assert_eq!(
            all.keys().copied().collect::<Vec<_>>(),
            [0, 3, 4],
            "a domain that the configuration has not is told"
        );
        assert_eq!((all[&0].0.as_str(), view(0)), ("base", vec![(3, "left"), (4, "right")]));
        assert_eq!((view(3), view(4)), (vec![(0, "base"), (4, "right")], vec![(0, "base"), (3, "left")]));
        let (to, from) = (&all[&3].1[&4], &all[&4].1[&3]);
        assert_eq!((to.theirs.len(), to.ours.len(), to.state), (1, 0, State::Paused));
        assert_eq!((&from.ours, from.theirs.len(), from.state), (&to.theirs, 0, State::Unknown));
    }

    #[test]
    fn x20_of_two_domains_with_one_name_neither_is_told() {
        let there = domains(&[(0, "Domain-0"), (3, "left"), (4, "right"), (5, "right"), (6, "base")]);
        let all = views(&config(), &there, &BTreeMap::new());
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), [0, 3]);
    }

    #[test]
    fn x22_states_are_read_from_what_xl_prints() {
        let text = "Name                                        ID   Mem VCPUs\tState\tTime(s)\n\
            Domain-0                                     0  2048     2     r-----      22.1\n\
            left                                         1   384     1     -b----       3.0\n\
            right one                                    2   384     1     --p---       2.9\n\
            crashed                                      3   384     1     ----c-       2.9\n\
            new                                          4   384     1     ------       0.0\n\
            5 512 1 --p--- 0.0\n\nnonsense --p---\nlong x 384 1 --p--- 1\n";
        let text = text.replace('\t', " ");
        let found = [
            (0, State::Running),
            (1, State::Running),
            (2, State::Paused),
            (3, State::Unknown),
            (4, State::Running),
            (5, State::Paused),
        ];
        assert_eq!(states(&text), BTreeMap::from(found));
    }
}
