// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The units for systemd: their settings, and that systemd understands them.

use std::{collections::BTreeMap, io::Write, path::PathBuf, process::Command};

const UNITS: [&str; 5] = [
    "tombolod.service",
    "tombolod-guest.service",
    "tombolo-holder.service",
    "tombolo-net.service",
    "tombolo-hook.service",
];

fn path(unit: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd")).join(unit)
}

/// Returns the settings of a unit: the first of each name, by section.
fn settings(text: &str) -> BTreeMap<(String, String), String> {
    let (mut section, mut all) = (String::new(), BTreeMap::new());
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.into();
        } else if let Some((name, value)) = line.split_once('=') {
            all.entry((section.clone(), name.to_owned())).or_insert_with(|| value.to_owned());
        }
    }
    all
}

/// Returns an error where the limits on restarts of a unit are wrong.
fn check_limits(text: &str) -> Result<(), String> {
    let all = settings(text);
    let setting = |section: &str, name: &str| all.get(&(section.to_owned(), name.to_owned())).map(String::as_str);
    for name in ["StartLimitIntervalSec", "StartLimitBurst"] {
        if setting("Service", name).is_some() {
            return Err(format!("systemd does not heed {name} in [Service]"));
        }
    }
    let number = |name: &str| -> Result<f64, String> {
        let value = setting("Unit", name).ok_or_else(|| format!("{name} is not set"))?;
        value.parse().map_err(|_| format!("{name}={value}"))
    };
    let (interval, burst) = (number("StartLimitIntervalSec")?, number("StartLimitBurst")?);
    let Some("always") = setting("Service", "Restart") else { return Ok(()) };
    let pause = setting("Service", "RestartSec").ok_or("RestartSec is not set")?;
    let pause: f64 = pause.strip_suffix("ms").and_then(|it| it.parse().ok()).ok_or(format!("RestartSec={pause}"))?;
    // A service that ends at once must reach the limit, and one that is killed now and then must not.
    if interval / (pause / 1000.0) <= burst {
        return Err(format!("a start each {pause} ms is never too many: {burst} in {interval} s"));
    }
    if burst < 20.0 {
        return Err(format!("{burst} starts are soon used up"));
    }
    Ok(())
}

#[test]
fn b16_units_are_started_again_and_not_for_ever_at_once() {
    for unit in UNITS {
        let text = std::fs::read_to_string(path(unit)).unwrap();
        assert_eq!(check_limits(&text), Ok(()), "{unit}");
        // A descriptor store that has lost its descriptors has nothing to restart with, and the hook is put in place
        // once.
        let restart = settings(&text).remove(&("Service".to_owned(), "Restart".to_owned()));
        assert_eq!(
            restart.as_deref() == Some("always"),
            !["tombolo-holder.service", "tombolo-hook.service"].contains(&unit),
            "{unit}"
        );
    }
}

#[test]
fn canary_units_without_limits_or_with_useless_ones_are_found() {
    let unit = |unit: &str, service: &str| format!("[Unit]\n{unit}\n[Service]\nRestart=always\n{service}\n");
    let limits = "StartLimitIntervalSec=300\nStartLimitBurst=200";
    assert_eq!(check_limits(&unit(limits, "RestartSec=100ms")), Ok(()));
    for (bad, why) in [
        (unit("", "RestartSec=100ms"), "is not set"),
        (unit("", &format!("RestartSec=100ms\n{limits}")), "in [Service]"),
        (unit(limits, "RestartSec=5000ms"), "never too many"),
        (unit("StartLimitIntervalSec=300\nStartLimitBurst=3", "RestartSec=100ms"), "soon used up"),
    ] {
        let said = check_limits(&bad).unwrap_err();
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn b16_broker_that_ends_waits_for_no_process_that_waits_for_a_stranger() {
    // `tombolod memory` cannot be killed while a hostile process holds a file's lock.
    let all = settings(&std::fs::read_to_string(path("tombolod.service")).unwrap());
    assert_eq!(all.get(&("Service".to_owned(), "KillMode".to_owned())).map(String::as_str), Some("process"));
}

#[test]
fn b22_units_of_brokers_let_them_see_the_addresses_of_their_kernel() {
    for unit in ["tombolod.service", "tombolod-guest.service"] {
        let all = settings(&std::fs::read_to_string(path(unit)).unwrap());
        let setting = |name: &str| all.get(&("Service".to_owned(), name.to_owned())).map(String::as_str);
        assert_eq!(setting("PrivateNetwork"), None, "{unit}: a namespace without the machine's addresses");
        assert!(setting("RestrictAddressFamilies").unwrap().contains("AF_NETLINK"), "{unit}");
    }
}

#[test]
fn units_are_understood_by_systemd() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for unit in UNITS {
        // A program that is not installed here is no error of the unit.
        let text = std::fs::read_to_string(path(unit)).unwrap();
        let text = text
            .replace("/usr/bin/tombolod", "/bin/true")
            .replace("/usr/bin/tombolo", "/bin/true")
            .replace("Before=libvirtd.service virtqemud.service", "");
        std::fs::write(folder.path().join(unit), text).unwrap();
        paths.push(folder.path().join(unit));
    }
    let verify =
        Command::new("systemd-analyze").args(["verify", "--man=no", "--recursive-errors=no"]).args(&paths).output();
    let Ok(output) = verify else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIP units_are_understood_by_systemd (needs systemd-analyze): there is no systemd here"
        );
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("tombolo")).collect();
    assert!(output.status.success() && ours.is_empty(), "{}: {said}", output.status);
}
