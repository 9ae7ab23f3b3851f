// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Examines the network interfaces that run here (`tombolo net`), and whether any could run.

use std::path::Path;

use serde_json::Value;

use super::finding::{Finding, Grade};
use crate::cmd::net::RULES_FOLDER;

/// Reasons for dropped frames that mean a broken or malicious sender (N-8).
const PEERS_FAULTS: [&str; 5] = ["short", "long", "header", "feature", "source"];

/// Facts about interfaces.
#[derive(Clone, Debug)]
pub struct Interfaces {
    /// Whether the device that makes them exists.
    pub tun: bool,
    /// Status that each interface reports.
    pub statuses: Vec<Value>,
}

/// Looks for the interfaces of this user, and for those of the host's rules.
pub fn probe() -> Interfaces {
    let own = tombolo_net::folder();
    let by_rule = Some(Path::new(RULES_FOLDER)).filter(|folder| **folder != own);
    // Folders of other users cannot be read, and are not this user's concern.
    let found =
        [Some(own.as_path()), by_rule].into_iter().flatten().filter_map(|folder| tombolo_net::find(folder).ok());
    let statuses = found.flatten().map(|found| found.status).collect();
    Interfaces { tun: Path::new("/dev/net/tun").exists(), statuses }
}

/// Judges whether an interface could be made.
pub fn tun(interfaces: &Interfaces) -> Finding {
    if interfaces.tun {
        Finding::new("tun", Grade::Ok, "/dev/net/tun is there (for tombolo net)")
    } else {
        let says = "/dev/net/tun is not there: no interface but the module's (for tombolo net)";
        Finding::new("tun", Grade::Warning, says).mend("modprobe tun; in a container --device /dev/net/tun")
    }
}

/// Judges the interfaces that run, and reports the worst of them.
pub fn interfaces(interfaces: &Interfaces) -> Finding {
    // An interface with ports has no link of its own: its ports have.
    let links: Vec<&Value> = interfaces.statuses.iter().filter(|status| status["ports"].is_null()).collect();
    if links.is_empty() {
        return Finding::new("interfaces", Grade::Info, "no interface of tombolo net is to be seen");
    }
    let name = |status: &Value| status["interface"].as_str().unwrap_or_default().to_owned();
    let told = |status: &Value| format!("{}: {}", name(status), status["reason"].as_str().unwrap_or_default());
    let warning = |status: &Value, says: String| {
        Finding::new("interfaces", Grade::Warning, says).mend(format!("tombolo net stat {}", name(status)))
    };
    if let Some(status) = links.iter().find(|status| is_refused(status)) {
        return warning(status, told(status));
    }
    if let Some((status, dropped)) = links.iter().find_map(|status| Some((status, peers_faults(status)?))) {
        let says = format!("{} dropped frames that its peer must not send: {dropped}", name(status));
        return warning(status, says);
    }
    let without: Vec<String> = links.iter().filter(|status| status["state"] != "linked").map(|one| told(one)).collect();
    let linked = format!("{} of {} interfaces and ports have their peer", links.len() - without.len(), links.len());
    if without.is_empty() {
        Finding::new("interfaces", Grade::Ok, linked)
    } else {
        Finding::new("interfaces", Grade::Info, format!("{linked}; {}", without.join("; ")))
    }
}

/// Returns whether a peer is there, and there is no link all the same. An interface that waits for an absent peer
/// states that as its reason.
fn is_refused(status: &Value) -> bool {
    let reason = status["reason"].as_str().unwrap_or_default();
    status["state"] != "linked" && !["waits ", "the link ended"].iter().any(|usual| reason.starts_with(usual))
}

/// Returns the number of dropped frames that are their sender's fault, by reason.
fn peers_faults(status: &Value) -> Option<String> {
    let dropped = &status["received"]["dropped"];
    let faults = PEERS_FAULTS.map(|why| (why, dropped[why].as_u64().unwrap_or(0)));
    let faults: Vec<String> =
        faults.iter().filter(|(_, count)| *count > 0).map(|(why, count)| format!("{count} {why}")).collect();
    (!faults.is_empty()).then(|| faults.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(state: &str, reason: &str, header: u64) -> Value {
        let dropped = json!({ "header": header, "stale": 7 });
        json!({ "interface": "tmb0", "state": state, "reason": reason, "received": { "dropped": dropped } })
    }

    fn judged(statuses: Vec<Value>) -> Finding {
        interfaces(&Interfaces { tun: true, statuses })
    }

    #[test]
    fn peers_that_are_not_there_are_told_and_those_that_do_not_fit_are_warned_of() {
        let linked = || one("linked", "linked with db", 0);
        let network = json!({ "interface": "lan", "state": "waiting", "reason": "0 of 2 ports linked", "ports": [] });
        let well = judged(vec![linked(), linked(), network.clone()]);
        assert!(well.grade == Grade::Ok && well.says.starts_with("2 of 2 "), "{well:?}");
        assert_eq!(judged(vec![network]).grade, Grade::Info);
        for usual in ["waits for vm:db/net: nobody listens there yet", "the link ended: the peer closed"] {
            let found = judged(vec![linked(), one("waiting", usual, 0)]);
            assert!(found.grade == Grade::Info && found.says.contains(usual), "{found:?}");
        }
        let refused = "no link with vm:db/net, tries again: the peer's address is 02:00:00:00:00:01";
        let found = judged(vec![linked(), one("waiting", refused, 0)]);
        assert!(found.grade == Grade::Warning && found.says.contains(refused), "{found:?}");
    }

    #[test]
    fn frames_that_a_peer_must_not_send_are_warned_of() {
        let found = judged(vec![one("linked", "linked with db", 3)]);
        assert!(found.grade == Grade::Warning && found.says.ends_with("send: 3 header"), "{found:?}");
        assert_eq!(found.remedy.as_deref(), Some("tombolo net stat tmb0"));
    }
}
