// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file that says which domains there are and what they may do (B-13, B-17).

pub mod nets;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::{Range, RangeInclusive},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use tombolo_control::{Message, NOBODY, NUMBERS, Name, Pattern, REGION_MAX, REGION_MIN};
use toml::Spanned;

use crate::endpoint::host_session::RULES_MAX;
use nets::{MTU_LEAST, Net};

/// Most mistakes of spelling and type that are told at once.
const MISTAKES_MAX: usize = 64;
/// Most vectors of a device: QEMU's own limit is higher, its use is not.
const VECTORS_MAX: u16 = 16;
/// Bytes of a region unless something else is said: several channels with rings of 1 MiB both ways.
const REGION: u64 = 16 << 20;
/// Bytes of a domain's links, unless something else is said: as many as it may have, and four that are not given back.
const MEMORY: u64 = (LINKS as u64 + 4) * 2 * REGION;
const LINKS: u16 = 12;
/// Bytes of a connection's window unless something else is said: a ring of 1 MiB, and room to exchange it for another.
const WINDOW: u64 = 2 << 20;
/// What a window may have: the least that holds a ring and what is around it, and half of the largest region.
const WINDOWS: RangeInclusive<u64> = 16 << 10..=512 << 20;
const PAGE: u64 = 4096;
/// How long programs may take to leave a link, by default and at most (B-21).
const LEAVE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Slots of a pc's root bus that links may have: 4 to 31. The first four are the board's, the display's and a network card's.
pub const PC_SLOTS: u16 = 28;

/// What is configured.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The file that says so.
    pub path: PathBuf,
    /// The host's name as a domain.
    pub host: Name,
    /// Group that may talk to the broker.
    pub group: Option<u32>,
    /// Bytes of a region where nobody asks for another size.
    pub region: u64,
    /// Bytes of a connection's window on this host.
    pub window: u64,
    /// How long programs may take to leave a link that is taken away (B-21).
    pub leave: Duration,
    /// Users of this host that are domains, too, by the name of the domain.
    pub accounts: BTreeMap<String, u32>,
    /// Where this host is dom0 of Xen's.
    pub xen: Option<Xen>,
    /// Domain numbers by the domains' names (B-19).
    pub numbers: BTreeMap<String, u16>,
    /// The virtual machines.
    pub domains: BTreeMap<String, Domain>,
    /// What is allowed.
    pub rules: Vec<Rule>,
    /// Links that there are always: the two ends, and the bytes of a region.
    pub links: Vec<([Name; 2], u64)>,
    /// Networks of machines (B-28).
    pub nets: Vec<Net>,
}

/// What domains of Xen are told.
#[derive(Debug, Clone, PartialEq)]
pub struct Xen {
    /// Those that have names here, as dom0 named them.
    pub domains: BTreeSet<Name>,
    /// The toolstack's command that lists them.
    pub xl: PathBuf,
}

/// A virtual machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    /// The board that QEMU plays.
    pub machine: MachineType,
    /// Root ports for links (`q35`).
    pub ports: u16,
    /// QEMU's control socket; none: the folder's own for it.
    pub qmp: Option<PathBuf>,
    /// The user that QEMU runs as, besides root and the broker's own.
    pub user: Option<u32>,
    /// Interrupt vectors of its doorbell device.
    pub vectors: u16,
    /// Most bytes of its links.
    pub memory: u64,
    /// Most links.
    pub links: u16,
    /// Most doorbells of peers that it has at a time.
    pub doorbells: u16,
}

/// The boards that are known.
#[derive(Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum MachineType {
    /// i440FX: a link takes two slots of the root bus.
    Pc,
    /// Q35: a link takes two root ports.
    Q35,
}

/// One rule: connections that are allowed (B-13).
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Who connects.
    pub from: Pattern,
    /// To whom.
    pub to: Pattern,
    /// To which service.
    pub service: Pattern,
}

/// All that is wrong, in the file's order, each on a line of its own: `file:line: what`.
#[derive(Debug)]
pub struct ConfigError(Vec<String>);

impl ConfigError {
    /// Each mistake.
    pub fn mistakes(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for ConfigError {}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    host: Host,
    #[serde(default)]
    account: BTreeMap<Spanned<String>, FileAccount>,
    xen: Option<FileXen>,
    #[serde(default)]
    domain: BTreeMap<Spanned<String>, FileDomain>,
    #[serde(default)]
    allow: Vec<FileRule>,
    #[serde(default)]
    link: Vec<FileLink>,
    #[serde(default)]
    net: Vec<FileNet>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Host {
    name: Option<Spanned<String>>,
    group: Option<u32>,
    region: Option<Spanned<String>>,
    #[serde(alias = "slice")]
    window: Option<Spanned<String>>,
    leave: Option<Spanned<String>>,
    number: Option<Spanned<u16>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAccount {
    user: Spanned<u32>,
    number: Option<Spanned<u16>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileXen {
    domains: Vec<Spanned<String>>,
    xl: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileDomain {
    machine: Option<MachineType>,
    ports: Option<Spanned<u16>>,
    qmp: Option<PathBuf>,
    user: Option<u32>,
    vectors: Option<Spanned<u16>>,
    memory: Option<Spanned<String>>,
    links: Option<u16>,
    #[serde(alias = "bells")]
    doorbells: Option<u16>,
    number: Option<Spanned<u16>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRule {
    from: Spanned<String>,
    to: Spanned<String>,
    service: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    between: Spanned<[Spanned<String>; 2]>,
    size: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileNet {
    name: Spanned<String>,
    domains: Spanned<Vec<Spanned<String>>>,
    mtu: Option<Spanned<u16>>,
    #[serde(default)]
    addresses: BTreeMap<Spanned<String>, Spanned<String>>,
}

/// The text under examination, and what was found wrong with it: the line, and what.
struct Source<'a> {
    path: &'a Path,
    text: &'a str,
    mistakes: RefCell<Vec<(usize, String)>>,
}

impl Source<'_> {
    fn line_of(&self, span: &Range<usize>) -> usize {
        1 + self.text.as_bytes()[..span.start.min(self.text.len())].iter().filter(|b| **b == b'\n').count()
    }

    fn report(&self, span: Range<usize>, what: impl fmt::Display) {
        self.mistakes.borrow_mut().push((self.line_of(&span), what.to_string()));
    }

    fn is_sound(&self) -> bool {
        self.mistakes.borrow().is_empty()
    }

    fn error(&self) -> ConfigError {
        let mut mistakes = self.mistakes.take();
        mistakes.sort();
        let path = self.path.display();
        ConfigError(mistakes.into_iter().map(|(line, what)| format!("{path}:{line}: {what}")).collect())
    }

    /// The file's tables. Of what is misspelt or of a wrong type each mistake is reported, and the line left out: the format's reader
    /// stops at one.
    fn tables(&self) -> Option<File> {
        let mut text = self.text.to_owned();
        for _ in 0..MISTAKES_MAX {
            let error = match toml::from_str(&text) {
                Ok(file) => return Some(file),
                Err(error) => error,
            };
            let span = error.span().unwrap_or_default();
            // What is missing may have been left out here.
            let is_missing = error.message().starts_with("missing field");
            if !is_missing || self.is_sound() {
                self.report(span.clone(), error.message().replace('\n', "; "));
            }
            let from = text[..span.start.min(text.len())].rfind('\n').map_or(0, |at| at + 1);
            let to = text[from..].find('\n').map_or(text.len(), |at| from + at);
            let line = &text[from..to];
            let is_entry = line.contains('=') && !line.trim_start().starts_with('[');
            if is_missing
                || !is_entry
                || error.message().contains("expected") && toml::from_str::<toml::Table>(&text).is_err()
            {
                return None;
            }
            text.replace_range(from..to, &" ".repeat(to - from));
        }
        None
    }

    fn checked<T>(&self, value: &Spanned<String>) -> Option<T>
    where
        T: std::str::FromStr<Err = tombolo_control::Fault>,
    {
        let text = value.get_ref();
        text.parse()
            .map_err(|fault: tombolo_control::Fault| self.report(value.span(), format!("{text:?}: {}", fault.what)))
            .ok()
    }

    fn region(&self, value: &Option<Spanned<String>>, default: u64) -> u64 {
        let size = self.bytes(value, default);
        match value {
            Some(value) if !is_region(size) => {
                self.report(value.span(), "a region is a power of two from 64KiB to 1GiB");
                default
            }
            _ => size,
        }
    }

    fn duration(&self, value: &Option<Spanned<String>>, default: Duration, most: Duration) -> Duration {
        let Some(value) = value else { return default };
        parse_duration(value.get_ref()).filter(|time| *time <= most).unwrap_or_else(|| {
            let (written, most) = (value.get_ref(), most.as_secs());
            self.report(value.span(), format!("{written:?} is no time up to {most} s: write `500ms` or `1s`"));
            default
        })
    }

    fn bytes(&self, value: &Option<Spanned<String>>, default: u64) -> u64 {
        let Some(value) = value else { return default };
        parse_bytes(value.get_ref()).unwrap_or_else(|| {
            let what = format!("{:?} is no size: write `65536`, `64KiB`, `1MiB` or `1GiB`", value.get_ref());
            self.report(value.span(), what);
            default
        })
    }
}

/// A time with its unit.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let number = |unit: &str| text.trim().strip_suffix(unit)?.trim_end().parse().ok();
    number("ms").map(Duration::from_millis).or_else(|| number("s").map(Duration::from_secs))
}

/// A number of bytes with an optional unit.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)]
        .into_iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|number| (number, shift)))?;
    let number: u64 = number.trim_end().parse().ok()?;
    number.checked_mul(1 << shift)
}

/// Whether a region may have this size (B-7).
#[must_use]
pub fn is_region(size: u64) -> bool {
    size.is_power_of_two() && (REGION_MIN..=REGION_MAX).contains(&size)
}

/// A name that was checked when it came in.
pub(crate) fn checked_name(text: &str) -> Name {
    text.parse().expect("names in the saved state were checked")
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// All that is wrong, each with its line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError(vec![format!("{}: {error}", path.display())]))?;
        Self::parse(path, &text)
    }

    /// Checks a text that came from `path`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let source = Source { path, text, mistakes: RefCell::default() };
        let config = source.tables().map(|file| file.check(&source));
        config.filter(|_| source.is_sound()).ok_or_else(|| source.error())
    }

    /// Two domains for which there are more rules than a link can have, and how many.
    fn too_many_rules(&self) -> Option<(Name, Name, usize)> {
        let most = usize::from(RULES_MAX);
        if self.rules.len() <= most {
            return None;
        }
        let machines = || self.domains.keys().map(|name| checked_name(name));
        let accounts = self.accounts.keys().map(|name| checked_name(name));
        let all: Vec<Name> = machines().chain(accounts).chain([self.host.clone()]).collect();
        machines().find_map(|a| {
            all.iter().find_map(|b| {
                let rules = self.services(&a, b).count() + self.services(b, &a).count();
                (rules > most).then(|| (a.clone(), b.clone(), rules))
            })
        })
    }

    /// Services of `to` that `from` may connect to (B-13).
    pub fn services<'a>(&'a self, from: &'a Name, to: &'a Name) -> impl Iterator<Item = &'a Pattern> {
        let rules = self.rules.iter().filter(move |rule| from != to && rule.from.matches(from) && rule.to.matches(to));
        rules.map(|rule| &rule.service)
    }

    /// Whether a domain is the host, or one of its accounts: programs of this kernel.
    #[must_use]
    pub fn is_local(&self, domain: &str) -> bool {
        domain == self.host.as_str() || self.accounts.contains_key(domain)
    }

    /// Domain numbers of `domain` itself and of its `peers` (B-19).
    #[must_use]
    pub fn numbers(&self, domain: &str, peers: impl Iterator<Item = Name>) -> BTreeMap<Name, u16> {
        let all = peers.chain([domain.parse().expect("checked")]);
        all.filter_map(|name: Name| self.numbers.get(name.as_str()).map(|number| (name.clone(), *number))).collect()
    }

    /// What a domain is told of the interfaces that it is to have (B-28).
    #[must_use]
    pub fn nets_of(&self, domain: &str) -> Vec<Message> {
        nets::messages(&self.nets, &checked_name(domain))
    }

    /// Whether a domain is one of Xen's.
    #[must_use]
    pub fn is_of_xen(&self, domain: &Name) -> bool {
        self.xen.as_ref().is_some_and(|xen| xen.domains.contains(domain))
    }

    /// Whether there is a domain of this name.
    #[must_use]
    pub fn knows(&self, domain: &str) -> bool {
        self.is_local(domain) || self.domains.contains_key(domain)
    }

    /// The domain that programs of a user belong to: its own account, or the host for root and the broker's user `own`.
    #[must_use]
    pub fn account_of(&self, user: u32, own: u32) -> Option<&str> {
        let account = self.accounts.iter().find(|(_, it)| **it == user).map(|(name, _)| name.as_str());
        account.or_else(|| (user == 0 || user == own).then_some(self.host.as_str()))
    }

    /// Whether two domains may have a link (B-13). Two of this kernel need none.
    #[must_use]
    pub fn may_link(&self, a: &Name, b: &Name) -> bool {
        !(self.is_local(a.as_str()) && self.is_local(b.as_str())) && self.has_rule(a, b)
    }

    fn has_rule(&self, a: &Name, b: &Name) -> bool {
        self.services(a, b).next().is_some() || self.services(b, a).next().is_some()
    }
}

impl File {
    /// What is configured, as far as it is sound: mistakes are reported.
    fn check(&self, source: &Source<'_>) -> Config {
        let default = || "host".parse().expect("a name");
        let host: Name = self.host.name.as_ref().and_then(|name| source.checked(name)).unwrap_or_else(default);
        let region = source.region(&self.host.region, REGION);
        let window = source.bytes(&self.host.window, WINDOW);
        if let Some(written) = self.host.window.as_ref().filter(|_| window % PAGE != 0 || !WINDOWS.contains(&window)) {
            source.report(written.span(), "a window is a multiple of 4096 bytes, from 16KiB to 512MiB");
        }
        let leave = source.duration(&self.host.leave, LEAVE.0, LEAVE.1);
        let own_name = || format!("{:?} is the host's own name", host.as_str());
        let mut accounts = BTreeMap::new();
        for (name, account) in &self.account {
            if *account.user.get_ref() == NOBODY {
                source.report(account.user.span(), "no user has this number");
            }
            if accounts.values().any(|user| user == account.user.get_ref()) {
                source.report(account.user.span(), "this user has an account already");
            }
            match source.checked::<Name>(name) {
                Some(checked) if checked == host => source.report(name.span(), own_name()),
                Some(checked) => _ = accounts.insert(checked.as_str().to_owned(), *account.user.get_ref()),
                None => {}
            }
        }
        let mut domains = BTreeMap::new();
        for (name, domain) in &self.domain {
            let checked_domain = domain.check(source);
            match source.checked::<Name>(name) {
                Some(checked) if checked == host => source.report(name.span(), own_name()),
                Some(checked) if accounts.contains_key(checked.as_str()) => {
                    source.report(name.span(), format!("an account of the host is called {checked}, too"));
                }
                Some(checked) => _ = domains.insert(checked.as_str().to_owned(), checked_domain),
                None => {}
            }
        }
        let numbers = self.numbers(source, host.as_str());
        let xen = self.xen.as_ref().map(|xen| xen.check(source));
        for name in self.xen.iter().flat_map(|xen| &xen.domains) {
            let text = name.get_ref();
            if text == host.as_str() || domains.contains_key(text) || accounts.contains_key(text) {
                source.report(name.span(), format!("another domain is called {text}, too"));
            }
        }
        let (group, rules, links, nets) = (self.host.group, Vec::new(), Vec::new(), Vec::new());
        let path = source.path.into();
        let mut config =
            Config { path, host, group, region, window, leave, accounts, xen, numbers, domains, rules, links, nets };
        let has_all_rules = self.check_rules(&mut config, source);
        self.check_nets(&mut config, source);
        self.check_links(&mut config, source, has_all_rules);
        if let (Some(last), Some((a, b, rules))) = (self.allow.last(), config.too_many_rules()) {
            let what = format!("{rules} rules are for {a} and {b}, and a link has {RULES_MAX}: write some as patterns");
            source.report(last.service.span(), what);
        }
        config
    }

    /// True if all of them are sound.
    fn check_rules(&self, config: &mut Config, source: &Source<'_>) -> bool {
        let xen = config.xen.iter().flat_map(|xen| xen.domains.iter().map(Name::as_str));
        let names = config.domains.keys().chain(config.accounts.keys()).map(String::as_str);
        let all: Vec<Name> =
            names.chain(xen).chain([config.host.as_str()]).map(|name| name.parse().expect("checked")).collect();
        let mut is_sound = true;
        for rule in &self.allow {
            let ends = [&rule.from, &rule.to].map(|end| (end, source.checked::<Pattern>(end)));
            for (written, pattern) in &ends {
                if let Some(pattern) = pattern.as_ref().filter(|it| !all.iter().any(|name| it.matches(name))) {
                    source.report(written.span(), format!("no domain is called {pattern}"));
                    is_sound = false;
                }
            }
            match (ends, source.checked(&rule.service)) {
                ([(_, Some(from)), (_, Some(to))], Some(service)) => config.rules.push(Rule { from, to, service }),
                _ => is_sound = false,
            }
        }
        is_sound
    }

    /// The networks, and the rules that they stand for (B-28).
    fn check_nets(&self, config: &mut Config, source: &Source<'_>) {
        for written in &self.net {
            let Some(net) = written.check(config, source) else { continue };
            net.mistakes().into_iter().for_each(|what| source.report(written.name.span(), what));
            if config.nets.iter().any(|it| it.name == net.name) {
                source.report(written.name.span(), format!("another network is called {}, too", net.name));
                continue;
            }
            config.nets.push(net);
            if let Some((_, machine, interface)) = nets::clash(&config.nets) {
                source
                    .report(written.name.span(), format!("{machine} has an interface {interface} of another network"));
            }
        }
        if !source.is_sound() {
            return;
        }
        let exact = |name: &Name| name.as_str().parse().expect("a name is a pattern");
        let rules = config.nets.iter().flat_map(|net| {
            net.pairs().map(|pair| {
                let [to, from] = pair.map(exact);
                Rule { from, to, service: exact(&net.service(pair)) }
            })
        });
        let rules: Vec<Rule> = rules.collect();
        config.rules.extend(rules);
    }

    fn check_links(&self, config: &mut Config, source: &Source<'_>, has_all_rules: bool) {
        for link in &self.link {
            let size = source.region(&link.size, config.region);
            let [a, b] = link.between.get_ref();
            let (Some(a), Some(b)) = (source.checked::<Name>(a), source.checked::<Name>(b)) else { continue };
            if let Some(end) = [&a, &b].into_iter().find(|end| config.is_of_xen(end)) {
                let what = format!("{end} is a domain of Xen's: it needs a rule and no link");
                source.report(link.between.span(), what);
            } else if !config.may_link(&a, &b) {
                // One that is not sound may be that which allows it.
                if has_all_rules {
                    source.report(link.between.span(), format!("no rule allows {a} and {b} anything"));
                }
            } else {
                config.links.push(([a, b], size));
            }
        }
        // Machines of a network have a link (B-28).
        for [a, b] in config.nets.iter().flat_map(Net::pairs) {
            if !config.links.iter().any(|(ends, _)| ends.contains(a) && ends.contains(b)) {
                config.links.push(([a.clone(), b.clone()], config.region));
            }
        }
    }

    /// Reads the domains that have a number (B-19).
    fn numbers(&self, source: &Source<'_>, host: &str) -> BTreeMap<String, u16> {
        let domains = self.domain.iter().map(|(name, it)| (name.get_ref().as_str(), &it.number));
        let accounts = self.account.iter().map(|(name, it)| (name.get_ref().as_str(), &it.number));
        let mut numbers = BTreeMap::new();
        for (name, number) in domains.chain(accounts).chain([(host, &self.host.number)]) {
            let Some(written) = number else { continue };
            let number = *written.get_ref();
            if number >= NUMBERS {
                source.report(written.span(), format!("numbers are below {NUMBERS}"));
            } else if let Some((other, _)) = numbers.iter().find(|(_, it)| **it == number) {
                source.report(written.span(), format!("{other} has this number"));
            } else {
                numbers.insert(name.to_owned(), number);
            }
        }
        numbers
    }
}

impl FileNet {
    /// The network as far as its parts are sound.
    fn check(&self, config: &Config, source: &Source<'_>) -> Option<Net> {
        let name: Option<Name> = source.checked(&self.name);
        let machines = || config.domains.keys().map(|name| checked_name(name));
        let (mut found, mut is_sound) = (BTreeMap::new(), true);
        for written in self.domains.get_ref() {
            let Some(pattern) = source.checked::<Pattern>(written) else {
                is_sound = false;
                continue;
            };
            let before = found.len();
            let matching = machines().filter(|name| pattern.matches(name));
            let any = matching.map(|name| found.insert(name, None)).count() > 0;
            is_sound &= any;
            let text = written.get_ref();
            if !any
                && (config.is_local(text)
                    || config.xen.iter().any(|xen| xen.domains.iter().any(|it| it.as_str() == text)))
            {
                source.report(
                    written.span(),
                    format!("{text} is no virtual machine under QEMU, and a network has no others"),
                );
            } else if !any {
                source.report(written.span(), format!("no machine is called {text}"));
            } else if found.len() == before {
                source.report(written.span(), format!("{text} is in this network already"));
            }
        }
        for (written, address) in &self.addresses {
            let machine = found.iter_mut().find(|(name, _)| name.as_str() == written.get_ref());
            match (machine, address.get_ref().parse()) {
                (None, _) => source.report(written.span(), format!("{} is not in this network", written.get_ref())),
                (_, Err(what)) => source.report(address.span(), what),
                (Some((_, known)), Ok(address)) => *known = Some(address),
            }
        }
        if let Some(mtu) = self.mtu.as_ref().filter(|mtu| *mtu.get_ref() < MTU_LEAST) {
            source.report(mtu.span(), format!("an MTU is {MTU_LEAST} to 65535"));
        }
        let domains = self.domains.get_ref();
        let is_pair = domains.len() == 2 && !domains.iter().any(|it| it.get_ref().ends_with('*'));
        let name = name.filter(|_| is_sound)?;
        Some(Net { name, machines: found, is_pair, mtu: self.mtu.as_ref().map(|mtu| *mtu.get_ref()) })
    }
}

impl FileXen {
    fn check(&self, source: &Source<'_>) -> Xen {
        let domains = self.domains.iter().filter_map(|name| source.checked(name)).collect();
        Xen { domains, xl: self.xl.clone().unwrap_or_else(|| "xl".into()) }
    }
}

impl FileDomain {
    fn check(&self, source: &Source<'_>) -> Domain {
        let machine = self.machine.unwrap_or(MachineType::Pc);
        match (machine, &self.ports) {
            (MachineType::Pc, Some(ports)) => {
                source.report(ports.span(), "`ports` is for machine = \"q35\"; on pc a link takes slots of the bus");
            }
            (MachineType::Q35, Some(ports)) if !(2..=64).contains(ports.get_ref()) => {
                source.report(ports.span(), "2 to 64 ports, of which a link takes two");
            }
            _ => {}
        }
        if let Some(vectors) = self.vectors.as_ref().filter(|n| !(1..=VECTORS_MAX).contains(n.get_ref())) {
            source.report(vectors.span(), format!("1 to {VECTORS_MAX} vectors"));
        }
        Domain {
            machine,
            ports: self.ports.as_ref().map_or(8, |ports| *ports.get_ref()),
            qmp: self.qmp.clone(),
            user: self.user.filter(|user| *user != NOBODY),
            vectors: self.vectors.as_ref().map_or(8, |vectors| *vectors.get_ref()),
            memory: source.bytes(&self.memory, MEMORY),
            links: self.links.unwrap_or(LINKS),
            doorbells: self.doorbells.unwrap_or(64),
        }
    }
}

impl Domain {
    /// Slots for links in all: two for each.
    #[must_use]
    pub fn slots(&self) -> u16 {
        match self.machine {
            MachineType::Pc => PC_SLOTS,
            MachineType::Q35 => self.ports,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("t.toml"), text).map_err(|error| error.to_string())
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn former_words_for_window_and_doorbells_still_do() {
        for (window, doorbells) in [("window", "doorbells"), ("slice", "bells")] {
            let config = parse(&format!("[host]\n{window} = \"64KiB\"\n[domain.a]\n{doorbells} = 5\n")).unwrap();
            assert_eq!((config.window, config.domains["a"].doorbells), (64 << 10, 5));
        }
    }

    #[test]
    fn b13_accounts_are_domains_of_their_users_and_need_no_link_to_each_other() {
        let all = "[[allow]]\nfrom = \"*\"\nto = \"*\"\nservice = \"*\"\n";
        let config = parse(&format!("[account.alice]\nuser = 1000\n{TWO}{all}")).unwrap();
        assert_eq!(
            [1000, 0, 7, 8].map(|user| config.account_of(user, 7)),
            [Some("alice"), Some("host"), Some("host"), None]
        );
        assert!(config.may_link(&name("alice"), &name("a")) && config.may_link(&name("a"), &name("host")));
        assert!(!config.may_link(&name("alice"), &name("host")));
        let twice = parse(&format!("[account.a]\nuser = 1\n{TWO}")).unwrap_err();
        assert!(twice.contains("t.toml:3: an account of the host is called a"), "{twice}");
        let twice = parse("[account.a]\nuser = 1\n[account.b]\nuser = 1\n").unwrap_err();
        assert!(twice.contains("t.toml:4: this user has an account"), "{twice}");
    }

    const TWO: &str = "[domain.a]\n[domain.b]\nmachine = \"q35\"\nports = 4\nmemory = \"8MiB\"\n";

    #[test]
    fn b13_more_rules_than_a_link_can_have_are_a_mistake() {
        let rule = |to: &str, service| format!("[[allow]]\nfrom = \"a\"\nto = \"{to}\"\nservice = \"s{service}\"\n");
        let most: String = (0..256).map(|service| rule("b", service)).chain([rule("host", 1)]).collect();
        assert!(parse(&format!("{TWO}{most}")).is_ok());
        let error = parse(&format!("{TWO}{most}{}", rule("*", 256))).unwrap_err();
        assert!(error.contains("257 rules are for a and b, and a link has 256"), "{error}");
    }

    #[test]
    fn b13_nothing_is_allowed_without_a_rule() {
        let config = parse(TWO).unwrap();
        assert!(!config.may_link(&name("a"), &name("b")) && !config.may_link(&name("a"), &name("host")));
        assert_eq!(config.services(&name("a"), &name("b")).count(), 0);
    }

    #[test]
    fn b13_rule_allows_one_way_one_service_and_no_domain_to_itself() {
        let config = parse(&format!("{TWO}[[allow]]\nfrom = \"a\"\nto = \"*\"\nservice = \"sql-*\"\n")).unwrap();
        let services = |from: &str, to: &str| config.services(&name(from), &name(to)).cloned().collect::<Vec<_>>();
        assert_eq!(services("a", "b"), ["sql-*".parse().unwrap()]);
        assert_eq!(services("a", "host").len(), 1);
        assert!(services("b", "a").is_empty() && services("a", "a").is_empty());
        assert!(config.may_link(&name("b"), &name("a")) && !config.may_link(&name("b"), &name("host")));
    }

    #[test]
    fn b17_quotas_and_defaults_are_those_of_the_file() {
        let config = parse(TWO).unwrap();
        let (a, b) = (&config.domains["a"], &config.domains["b"]);
        assert_eq!((a.memory, a.slots(), a.vectors, a.links), (512 << 20, 28, 8, 12));
        assert_eq!((b.memory, b.slots(), b.machine), (8 << 20, 4, MachineType::Q35));
    }

    #[test]
    fn x20_domains_of_xen_have_names_and_rules_and_no_links() {
        let config = parse(
            "[xen]\ndomains = [\"left\", \"right\"]\n[[allow]]\nfrom = \"left\"\nto = \"right\"\nservice = \"*\"\n",
        );
        let config = config.unwrap();
        assert!(config.is_of_xen(&name("left")) && !config.is_of_xen(&name("host")) && !config.knows("left"));
        assert_eq!(config.xen.as_ref().map(|xen| xen.xl.as_path()), Some(Path::new("xl")));
        assert_eq!(config.services(&name("left"), &name("right")).count(), 1);
        assert!(parse(TWO).unwrap().xen.is_none());
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, said) in [
            ("[domain.a]\n\nvectors = 17\n", "t.toml:3: 1 to 16 vectors"),
            ("[domain.a]\nvectors = \"two\"\n", "t.toml:2: invalid type"),
            ("[domain.a]\nvektors = 2\n", "t.toml:2: unknown field `vektors`"),
            ("[domain.\"a b\"]\n", "t.toml:1: \"a b\": a name is"),
            ("[domain.host]\n", "t.toml:1: \"host\" is the host's own name"),
            ("[domain.a]\nmemory = \"8 MB\"\n", "t.toml:2: \"8 MB\" is no size"),
            ("[domain.a]\nports = 4\n", "t.toml:2: `ports` is for machine"),
            ("[host]\nregion = \"3MiB\"\n", "t.toml:2: a region is a power of two"),
            ("[host]\nwindow = \"5000\"\n", "t.toml:2: a window is a multiple of 4096"),
            ("[domain.a]\n[[allow]]\nfrom = \"a\"\nto = \"b\"\nservice = \"x\"\n", "t.toml:4: no domain is called b"),
            ("[domain.a]\n[[allow]]\nfrom = \"a\"\nto = \"host\"\n", "t.toml:2: missing field `service`"),
            ("[domain.a\n", "t.toml:1: "),
            ("[domain.a]\n[[link]]\nbetween = [\"a\", \"host\"]\n", "t.toml:3: no rule allows a and host anything"),
            ("[domain.a]\n[[link]]\nbetween = [\"a\"]\n", "t.toml:3: "),
            ("[domain.a]\nnumber = 32752\n", "t.toml:2: numbers are below 32752"),
            ("[host]\nnumber = 1\n[domain.a]\nnumber = 1\n", "t.toml:2: a has this number"),
            ("[xen]\ndomains = [\n\"a b\"]\n", "t.toml:3: \"a b\": a name is"),
            ("[xen]\ndomains = [\"host\"]\n", "t.toml:2: another domain is called host"),
            ("[domain.a]\n[xen]\ndomains = [\"a\"]\n", "t.toml:3: another domain is called a"),
            ("[xen]\nxl = \"xl\"\n", "t.toml:1: missing field `domains`"),
            ("[domain.a]\n[[net]]\nname = \"n\"\ndomains = [\"a\", \"b\"]\n", "t.toml:4: no machine is called b"),
            (
                "[domain.a]\n[[net]]\nname = \"n\"\ndomains = [\"a\", \"host\"]\n",
                "t.toml:4: host is no virtual machine",
            ),
            ("[domain.a]\n[[net]]\ndomains = [\"*\"]\n", "t.toml:2: missing field `name`"),
            ("[domain.a]\n[[net]]\nname = \"n\"\ndomains = [\"*\"]\n", "t.toml:3: a network has two machines or more"),
            (
                "[xen]\ndomains = [\"a\"]\n[[allow]]\nfrom=\"*\"\nto=\"*\"\nservice=\"*\"\n[[link]]\nbetween = [\"a\", \"host\"]\n",
                "t.toml:8: a is a domain of Xen's",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(said), "{text:?}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn all_mistakes_are_told_in_the_order_of_the_file() {
        let text = "[domain.z]\nvectors = 17\nvektors = 2\n[domain.a]\nlinks = \"two\"\nmemory = \"8 MB\"\n\
                    [[allow]]\nfrom = \"q\"\nto = \"z\"\nservice = \"a b\"\n\
                    [[link]]\nbetween = [\"a\", \"z\"]\nsize = \"5\"\n";
        let error = parse(text).unwrap_err();
        let lines: Vec<_> = error.lines().map(|line| line.split(':').nth(1).unwrap_or_default()).collect();
        assert_eq!(lines, ["2", "3", "5", "6", "8", "10", "13"], "{error}");
        // What cannot be read at all is the only mistake that is told.
        assert_eq!(parse("[domain.a]\nvectors = 17\n[domain.b\n").unwrap_err().lines().count(), 1);
    }

    /// Two machines in a network, and what else its rule says.
    fn net(more: &str) -> Result<Config, String> {
        parse(&format!("[domain.a]\n[domain.b]\n[[net]]\nname = \"tmb0\"\ndomains = [\"a\", \"b\"]\n{more}\n"))
    }

    #[test]
    fn b28_network_stands_for_a_link_and_a_rule_of_its_own_service_one_way() {
        let config = net("").unwrap();
        let [a, b] = ["a", "b"].map(name);
        assert_eq!(config.links, [([a.clone(), b.clone()], REGION)]);
        assert_eq!(config.services(&b, &a).cloned().collect::<Vec<_>>(), ["net.tmb0".parse().unwrap()]);
        assert_eq!(config.services(&a, &b).count(), 0);
        assert!(config.may_link(&a, &b) && config.nets_of("a").len() == 1 && config.nets_of("host").is_empty());
        // A link of the machines' own stays as it is.
        let own =
            "[[link]]\nbetween = [\"b\", \"a\"]\nsize = \"64MiB\"\n[[allow]]\nfrom=\"a\"\nto=\"b\"\nservice=\"x\"";
        assert_eq!(net(own).unwrap().links, [([b, a], 64 << 20)]);
    }

    #[test]
    fn b28_mistakes_in_a_network_are_told_with_their_line() {
        let two = "[[net]]\nname = \"lan\"\ndomains = [\"*\"]";
        for (more, said) in [
            ("mtu = 67", "t.toml:6: an MTU is 68 to 65535"),
            ("addresses = { c = \"10.9.0.1\" }", "t.toml:6: c is not in this network"),
            ("addresses = { a = \"10.9.0\" }", "t.toml:6: \"10.9.0\": an address is written as"),
            ("addresses = { a = \"127.0.0.1\" }", "t.toml:6: \"127.0.0.1\" is no address that a machine can have"),
            ("addresses = { a = \"10.9.0.1\", b = \"10.9.0.1\" }", "t.toml:4: a and b have the address 10.9.0.1"),
            ("addresses = { a = \"10.9.0.1\", b = \"fd00::1\" }", "t.toml:4: b's address is not of the kind"),
            ("domains_ = 1", "t.toml:6: unknown field"),
            ("[[net]]\nname = \"tmb0\"\ndomains = [\"*\"]", "t.toml:7: another network is called tmb0, too"),
            ("[[net]]\nname = \"twelve-bytes-\"\ndomains = [\"*\", \"b\"]", "t.toml:8: b is in this network already"),
            (
                "[[net]]\nname = \"fourteen-bytes\"\ndomains = [\"*\"]",
                "t.toml:7: an interface would be called fourteen-bytes-",
            ),
        ] {
            let error = net(more).unwrap_err();
            assert!(error.starts_with(said), "{more:?}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(net(two).is_ok());
        assert!(net(&format!("{two}\naddresses = {{ a = \"10.8.0.1/24\" }}")).is_ok());
        let clash = "[domain.c]\n[[net]]\nname = \"lan-b\"\ndomains = [\"a\", \"c\"]\n[[net]]\nname = \"lan\"\ndomains = [\"*\"]";
        let error = net(clash).unwrap_err();
        assert!(error.starts_with("t.toml:11: a has an interface lan-b of another network"), "{error}");
        let clash = "[domain.c]\n[[net]]\nname = \"lan\"\ndomains = [\"*\"]\n[[net]]\nname = \"lan-c\"\ndomains = [\"*\", \"d\"]\n[domain.d]";
        let error = net(&clash.replace("\"*\", \"d\"", "\"a\", \"b\", \"d\"")).unwrap_err();
        assert!(error.starts_with("t.toml:11: a has an interface lan-c of another network"), "{error}");
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(["4096", "64KiB", "2 MiB", "1GiB"].map(parse_bytes), [4096, 65536, 2 << 20, 1 << 30].map(Some));
        assert!(["", "KiB", "-1", "1KB", "99999999999GiB"].iter().all(|bad| parse_bytes(bad).is_none()));
    }
}
