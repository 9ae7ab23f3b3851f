// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Translates a domain's number and a path or a port into the address where two endpoints meet (W-1).

use std::{collections::BTreeMap, env, fmt, fmt::Write, fs, io, path::Path};

use sha2::{Digest, Sha256};

use crate::border::{Fault, Outcome};

/// Path of the map, unless `TOMBOLO_VCHAN_CONF` names another.
const MAP: &str = "/etc/tombolo/vchan.conf";
/// Device that exists in a Xen domain.
const XENBUS: &str = "/dev/xen/xenbus";
/// Bound below which domains have their numbers, as under Xen.
const DOMAINS: u16 = 0x7ff0;
/// Length of the longest key that is not digested.
const KEY_MAX: usize = 40;

/// Role in which an endpoint meets its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Server,
    Client,
}

/// Way to reach a domain.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Route {
    /// Through a socket in a folder, or in the folder of services.
    Local(Option<String>),
    /// As a Xen domain.
    Xen,
    /// As a Xen domain whose programs run the original.
    Original,
    /// Through the broker, under the name that it gave the machine.
    Vm(String),
    /// In this process.
    #[cfg(feature = "testing")]
    Harsh,
}

/// Contents of the map file.
#[derive(Default, PartialEq, Eq, Debug)]
struct Map {
    own: Option<u16>,
    domains: BTreeMap<u16, Route>,
    default: Option<Route>,
}

/// Address where two endpoints meet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum VchanAddress {
    /// An address of Tombolo's.
    Channel(String),
    /// A place in XenStore, by the layout of the original.
    Original(u16, String),
}

impl fmt::Display for VchanAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Channel(address) => f.write_str(address),
            Self::Original(peer, path) => write!(f, "xen:{peer}/vchan:{path}"),
        }
    }
}

impl VchanAddress {
    /// Returns the number of the peer's domain if it is a Xen domain.
    pub(crate) fn domain_of_xen(&self) -> Option<u16> {
        match self {
            Self::Channel(address) => address.strip_prefix("xen:")?.split('/').next()?.parse().ok(),
            Self::Original(peer, _) => Some(*peer),
        }
    }
}

/// Returns the address where this endpoint, in its role, meets `domain` for `path`.
pub(crate) fn place(role: Role, domain: i32, path: &str) -> Outcome<VchanAddress> {
    let (mut map, domain) = (Map::load()?, number(domain)?);
    map.complete(domain, tombolo_backends::vchan::named);
    map.place(role, domain, path)
}

fn number(domain: i32) -> Outcome<u16> {
    let number = u16::try_from(domain).ok().filter(|number| *number < DOMAINS);
    number.ok_or_else(|| Fault::with(libc::EINVAL, format!("{domain} is no domain's number: 0 to {}", DOMAINS - 1)))
}

impl Map {
    fn load() -> Outcome<Self> {
        let named = env::var("TOMBOLO_VCHAN_CONF").ok().filter(|path| !path.is_empty());
        let path = named.as_deref().unwrap_or(MAP);
        let mut map = match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).map_err(|fault| fault.of(path))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => Self {
                // Under Xen the numbers are Xen's, and nothing has to be configured.
                default: Path::new(XENBUS).exists().then_some(Route::Xen),
                ..Self::default()
            },
            Err(error) => return Err(Fault::from(error).of(path)),
        };
        if let Ok(own) = env::var("TOMBOLO_VCHAN_SELF") {
            map.own = Some(
                own.parse().ok().map_or_else(|| number(-1), number).map_err(|fault| fault.of("TOMBOLO_VCHAN_SELF"))?,
            );
        }
        Ok(map)
    }

    /// Asks the broker for what the file lacks: who has the number `domain`, and this domain's own number. A broker
    /// that does not answer, or is not there, changes nothing.
    fn complete(&mut self, domain: u16, ask: impl Fn(Option<u16>) -> io::Result<Option<(u16, String)>>) {
        if self.default.is_none()
            && !self.domains.contains_key(&domain)
            && let Ok(Some((_, name))) = ask(Some(domain))
        {
            self.domains.insert(domain, Route::Vm(name));
        }
        let numbered = matches!(self.route(domain), Ok(Route::Local(_) | Route::Vm(_)));
        if numbered && self.own.is_none() {
            self.own = ask(None).ok().flatten().map(|(own, _)| own);
        }
    }

    fn parse(text: &str) -> Outcome<Self> {
        let mut map = Self::default();
        for (line, at) in text.lines().zip(1..) {
            let words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
            let bad = |why: &str| Fault::with(libc::EINVAL, format!("line {at}: {why}"));
            let numbered = |word: &str| word.parse().map_err(|_| bad("a domain's number is missing")).and_then(number);
            let said_before = match *words.as_slice() {
                [] => false,
                ["self", own] => map.own.replace(numbered(own)?).is_some(),
                ["domain", domain, route] => {
                    let domain = numbered(domain)?;
                    let route = Route::parse(route, Some(domain)).map_err(|why| bad(&why))?;
                    map.domains.insert(domain, route).is_some()
                }
                ["default", route] => {
                    map.default.replace(Route::parse(route, None).map_err(|why| bad(&why))?).is_some()
                }
                _ => return Err(bad("it is neither `self N`, `domain N ROUTE` nor `default ROUTE`")),
            };
            if said_before {
                return Err(bad("that was said before"));
            }
        }
        Ok(map)
    }

    fn place(&self, role: Role, domain: u16, path: &str) -> Outcome<VchanAddress> {
        if self.route(domain)? == &Route::Original {
            key(path)?;
            return Ok(VchanAddress::Original(domain, path.into()));
        }
        self.address(role, domain, path).map(VchanAddress::Channel)
    }

    fn route(&self, domain: u16) -> Outcome<&Route> {
        self.domains.get(&domain).or(self.default.as_ref()).ok_or_else(|| {
            let text = format!(
                "nothing says how domain {domain} is reached: write `domain {domain} ROUTE` into {MAP}, or `number = {domain}` into the \
                 configuration of the host's tombolod"
            );
            Fault::with(libc::ENXIO, text)
        })
    }

    fn address(&self, role: Role, domain: u16, path: &str) -> Outcome<String> {
        let route = self.route(domain)?;
        let key = key(path)?;
        if *route == Route::Xen {
            // Xen itself tells the two endpoints apart.
            return Ok(format!("xen:{domain}/vchan-{key}"));
        }
        let own = self.own.ok_or_else(|| {
            Fault::with(
                libc::ENXIO,
                format!("this domain's own number is not known: write `self N` into {MAP}, or set TOMBOLO_VCHAN_SELF"),
            )
        })?;
        let (server, client) = if role == Role::Server { (own, domain) } else { (domain, own) };
        let name = format!("vchan-{server}-{client}-{key}");
        Ok(match (route, role) {
            (Route::Local(None), _) => format!("local:{name}"),
            (Route::Local(Some(folder)), _) => format!("local:{folder}/{name}"),
            (Route::Vm(_), Role::Server) => format!("vm:{name}"),
            (Route::Vm(machine), Role::Client) => format!("vm:{machine}/{name}"),
            (Route::Xen | Route::Original, _) => unreachable!("answered above"),
            #[cfg(feature = "testing")]
            (Route::Harsh, _) => format!("harsh:server/{name}"),
        })
    }
}

impl Route {
    fn parse(text: &str, domain: Option<u16>) -> Result<Self, String> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("local", "") => Ok(Self::Local(None)),
            ("local", folder) if folder.starts_with('/') => Ok(Self::Local(Some(folder.trim_end_matches('/').into()))),
            ("local", _) => Err("after `local:` comes a folder that begins with `/`, or nothing".into()),
            ("xen", "") => Ok(Self::Xen),
            ("xen", number) if domain.is_some_and(|domain| domain.to_string() == number) => Ok(Self::Xen),
            ("xen", "vchan:") => Ok(Self::Original),
            ("xen", _) => Err("a domain of Xen's has the number that Xen gave it: `xen` is all, and `xen:vchan:` where it runs the original".into()),
            ("vm", name) if !name.is_empty() && !name.contains('/') && domain.is_some() => Ok(Self::Vm(name.into())),
            ("vm", _) => Err("a machine is reached by `domain N vm:NAME`".into()),
            #[cfg(feature = "testing")]
            ("harsh", "") => Ok(Self::Harsh),
            #[cfg(feature = "testing")]
            ("fake-xen", "") => Ok(Self::Original),
            _ => Err(format!("{text:?} is no route: local:, local:/FOLDER, xen, xen:vchan: or vm:NAME")),
        }
    }
}

/// Returns the key for a path in XenStore. A Qubes port becomes its number. Otherwise letters and digits stand for
/// themselves, `_` for a slash, `-` and two hexadecimal digits for any other byte (W-1). A key that becomes too long is
/// digested.
pub(crate) fn key(path: &str) -> Outcome<String> {
    let path = within_domain(path);
    if path.is_empty() {
        return Err(Fault::new(libc::EINVAL, "the path of a vchan is empty"));
    }
    if let Some((_, port)) = path.strip_prefix("data/vchan/").and_then(|rest| rest.split_once('/'))
        && is_number(port)
        && port.len() <= 10
    {
        return Ok(port.into());
    }
    let mut key = String::from("p-");
    for byte in path.bytes() {
        match byte {
            b'/' => key.push('_'),
            byte if byte.is_ascii_alphanumeric() => key.push(byte.into()),
            byte => write!(key, "-{byte:02x}").expect("a String takes all"),
        }
    }
    if key.len() > KEY_MAX {
        key = String::from("h-");
        for byte in &Sha256::digest(path)[..16] {
            write!(key, "{byte:02x}").expect("a String takes all");
        }
    }
    Ok(key)
}

/// Returns the path below the server's own folder, which the server may leave out.
fn within_domain(path: &str) -> &str {
    let rest = path.strip_prefix("/local/domain/").and_then(|rest| rest.split_once('/'));
    rest.filter(|(domain, _)| is_number(domain)).map_or(path, |(_, rest)| rest)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "# A map.\nself 3\ndomain 0 local:/run/vchan/ # a folder\ndomain 7 xen:7\ndomain 8 vm:web\n\ndefault local:\n";

    fn at(map: &Map, role: Role, domain: u16, path: &str) -> String {
        map.address(role, domain, path).unwrap()
    }

    #[test]
    fn w1_both_ends_of_a_path_meet_at_one_address() {
        let server = Map::parse("self 3\ndomain 5 local:/run/vchan").unwrap();
        let client = Map::parse("self 5\ndefault local:/run/vchan").unwrap();
        for (listening, connecting) in [
            ("data/vchan/5/42", "/local/domain/3/data/vchan/5/42"),
            ("/local/domain/3/data/vchan/5/42", "/local/domain/3/data/vchan/5/42"),
            ("a/path of-its_own", "/local/domain/3/a/path of-its_own"),
        ] {
            assert_eq!(at(&server, Role::Server, 5, listening), at(&client, Role::Client, 3, connecting));
        }
        assert_eq!(at(&server, Role::Server, 5, "data/vchan/5/42"), "local:/run/vchan/vchan-3-5-42");
        // The other way round is another vchan.
        assert_ne!(at(&server, Role::Client, 5, "a"), at(&server, Role::Server, 5, "a"));
    }

    #[test]
    fn w1_addresses_are_those_of_each_route() {
        let map = Map::parse(FILE).unwrap();
        assert_eq!(at(&map, Role::Server, 0, "a/b"), "local:/run/vchan/vchan-3-0-p-a_b");
        assert_eq!(at(&map, Role::Client, 1, "a/b"), "local:vchan-1-3-p-a_b");
        assert_eq!(at(&map, Role::Server, 7, "data/vchan/7/1"), "xen:7/vchan-1");
        assert_eq!(at(&map, Role::Client, 7, "/local/domain/7/data/vchan/3/1"), "xen:7/vchan-1");
        let original = Map::parse("default xen:vchan:").unwrap().place(Role::Client, 7, "/local/domain/7/x").unwrap();
        assert_eq!(original, VchanAddress::Original(7, "/local/domain/7/x".into()));
        assert_eq!(original.to_string(), "xen:7/vchan:/local/domain/7/x");
        assert_eq!(at(&map, Role::Server, 8, "x"), "vm:vchan-3-8-p-x");
        assert_eq!(at(&map, Role::Client, 8, "x"), "vm:web/vchan-8-3-p-x");
    }

    #[test]
    fn w1_paths_that_differ_have_names_that_differ() {
        let long = "x".repeat(100);
        let paths = ["a/b", "a_b", "a-b", "a-5fb", "a/b/", "A/b", "42", "data/vchan/1/42", "data/vchan/1/x", &long];
        let mut keys: Vec<String> = paths.iter().map(|path| key(path).unwrap()).collect();
        assert!(keys.iter().all(|key| key.len() <= KEY_MAX), "{keys:?}");
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), paths.len());
        assert_eq!(key("data/vchan/1/42"), key("/local/domain/9/data/vchan/2/42"), "numbers of domains are no names");
    }

    #[test]
    fn w1_map_that_makes_no_sense_says_where() {
        for (text, why) in [
            ("self", "line 1: it is neither"),
            ("self x", "line 1: a domain's number"),
            ("self 1\nself 2", "line 2: that was said before"),
            ("domain 1 local:run", "line 1: after `local:`"),
            ("\ndomain 1 pigeon:", "line 2: \"pigeon:\" is no route"),
            ("domain 1 xen:2", "line 1: a domain of Xen's"),
            ("default vm:web", "line 1: a machine"),
            ("domain 32752 xen", "32752 is no domain's number"),
        ] {
            let fault = Map::parse(text).unwrap_err();
            assert!(fault.errno == libc::EINVAL && fault.text.starts_with(why), "{text}: {}", fault.text);
        }
    }

    #[test]
    fn w1_broker_is_asked_for_what_the_file_does_not_say() {
        let broker = |number: Option<u16>| match number {
            Some(7) => Ok(Some((7, "web".to_owned()))),
            None => Ok(Some((3, "db".to_owned()))),
            Some(4) => Ok(None),
            Some(_) => Err(io::ErrorKind::NotFound.into()),
        };
        let asked = |text: &str, domain| {
            let mut map = Map::parse(text).unwrap();
            map.complete(domain, broker);
            map.address(Role::Client, domain, "x")
        };
        assert_eq!(asked("", 7).unwrap(), "vm:web/vchan-7-3-p-x");
        assert_eq!(asked("self 5", 7).unwrap(), "vm:web/vchan-7-5-p-x");
        assert_eq!(asked("domain 7 vm:other", 7).unwrap(), "vm:other/vchan-7-3-p-x");
        assert_eq!(asked("default local:", 7).unwrap(), "local:vchan-7-3-p-x");
        assert_eq!(asked("default xen", 7).unwrap(), "xen:7/vchan-p-x");
        for nobody in [4, 9] {
            assert!(asked("", nobody).unwrap_err().text.contains("`number = "));
        }
    }

    #[test]
    fn w1_what_nothing_says_is_told_with_what_to_write() {
        let unknown = Map::default().address(Role::Client, 4, "x").unwrap_err();
        assert!(unknown.text.contains("`domain 4 ROUTE`"), "{}", unknown.text);
        let nameless = Map::parse("default local:").unwrap().address(Role::Client, 4, "x").unwrap_err();
        assert!(nameless.text.contains("`self N`"), "{}", nameless.text);
        assert_eq!(number(-1).unwrap_err().errno, libc::EINVAL);
    }
}
