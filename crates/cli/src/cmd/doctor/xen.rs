// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Examines what a Xen domain needs: the drivers' devices, the right to open them, XenStore, grants that are left.

use std::{fs, io::ErrorKind, path::Path};

use super::finding::{Finding, Grade};

/// Devices, each with the driver that makes it; XenStore's has no driver that can be loaded.
const DEVICES: [(&str, Option<&str>); 4] = [
    ("gntalloc", Some("xen-gntalloc")),
    ("gntdev", Some("xen-gntdev")),
    ("evtchn", Some("xen-evtchn")),
    ("xenbus", None),
];
/// Pages that one endpoint of a channel with rings of the usual size grants.
const CHANNEL: u64 = 256 + 4;
/// File of the driver with the number of pages that all programs together may grant.
const LIMIT: &str = "/sys/module/xen_gntalloc/parameters/limit";

/// State of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    There,
    Missing,
    /// This user may not open it.
    Denied,
}

/// Parts of Xen that are here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domain {
    /// Whether this domain controls the others: dom0.
    pub controls: bool,
    /// States of the [`DEVICES`].
    pub devices: [Device; 4],
    /// Trial of the domain's number, a granted page and an event channel; made where all devices are there.
    pub tried: Option<Result<u16, String>>,
    /// Pages that all programs together may grant.
    pub limit: Option<u64>,
    /// Pages that programs hold granted, as far as this user may look.
    pub granted: u64,
    /// Pages that programs keep because a peer has not said that it unmapped them.
    pub quarantine: u64,
    /// Pages that `tombolod` keeps for programs that died, if it runs here.
    pub kept: Option<u64>,
}

/// Examines this domain. Returns `None` if no Xen is under this kernel.
pub fn probe() -> Option<Domain> {
    let says = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let folder = Path::new("/dev/xen");
    if says("/sys/hypervisor/type").trim() != "xen" && !folder.is_dir() {
        return None;
    }
    let devices = DEVICES.map(|(name, _)| device(&folder.join(name)));
    let there = devices == [Device::There; 4];
    let reaper = tombolo_inspect::reaper_holdings();
    let (granted, quarantine) = tombolo_inspect::count_granted_pages().unwrap_or_default();
    Some(Domain {
        controls: says("/proc/xen/capabilities").contains("control_d"),
        devices,
        tried: there.then(|| tombolo_backends::xen::try_out().map_err(|error| error.to_string())),
        limit: says(LIMIT).trim().parse().ok(),
        granted,
        quarantine,
        kept: reaper.there.then(|| reaper.kept.iter().map(|kept| kept.pages).sum()),
    })
}

fn device(path: &Path) -> Device {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => Device::There,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Device::Denied,
        Err(_) => Device::Missing,
    }
}

/// Judges the domain.
pub fn xen(domain: Option<&Domain>) -> Finding {
    let Some(domain) = domain else {
        return Finding::new("xen", Grade::Info, "no Xen is under this kernel");
    };
    let wrong = |says: String| Finding::new("xen", Grade::Warning, says);
    let those = |is: Device| {
        let found = DEVICES.iter().zip(domain.devices).filter(move |(_, device)| *device == is);
        found.map(|((name, driver), _)| (*name, *driver)).collect::<Vec<_>>()
    };
    let named = |devices: &[(&str, Option<&str>)]| devices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let (missing, denied) = (those(Device::Missing), those(Device::Denied));
    if !missing.is_empty() {
        let drivers: Vec<_> = missing.iter().filter_map(|(_, driver)| *driver).collect();
        let remedy = match drivers.as_slice() {
            [] => "a kernel with CONFIG_XEN_XENBUS_FRONTEND: apt install linux-image-amd64".into(),
            drivers => format!("modprobe -a {}", drivers.join(" ")),
        };
        return wrong(format!("/dev/xen has no {}: no channels to other domains", named(&missing))).mend(remedy);
    }
    if !denied.is_empty() {
        let paths: Vec<_> = denied.iter().map(|(name, _)| format!("/dev/xen/{name}")).collect();
        return wrong(format!("this user may not open {} in /dev/xen", named(&denied)))
            .mend(format!("run it as root, or: setfacl -m u:$USER:rw {}", paths.join(" ")));
    }
    let Some(Ok(number)) = &domain.tried else {
        let why = domain.tried.as_ref().and_then(|tried| tried.as_ref().err()).map_or("", String::as_str);
        return wrong(format!("grants, event channels or XenStore do not work: {why}")).mend(match domain.controls {
            true => "systemctl start xenstored xen-init-dom0".to_owned(),
            false => format!("echo 100000 > {LIMIT}; in dom0: xenstore-ls, and xl dmesg"),
        });
    };
    let name = if domain.controls { "dom0, domain" } else { "domain" };
    let (limit, granted) = (domain.limit.unwrap_or(0), domain.granted);
    let left = limit.saturating_sub(granted + domain.kept.unwrap_or(0));
    let mut says = format!(
        "{name} {number}: pages are granted and events sent; {granted} of {limit} pages are granted, room for {} ends \
         of channels with rings of 1 MiB",
        left / CHANNEL
    );
    if domain.quarantine > 0 {
        says += &format!("; {} in quarantine, see tombolo ls", domain.quarantine);
    }
    match domain.kept {
        Some(0) => {}
        Some(pages) => says += &format!("; tombolod keeps {pages} of programs that died, see tombolo ls"),
        None => says += "; no tombolod tells what programs that died left mapped",
    }
    if domain.controls {
        says += "; what other domains still map of programs that are gone: xl debug-keys g; xl dmesg";
    }
    if left < CHANNEL {
        return wrong(says).mend(format!("echo {} > {LIMIT}", limit + 100_000));
    }
    Finding::new("xen", Grade::Ok, says)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantine_is_told_and_who_else_can_be_asked() {
        let (devices, tried, limit) = ([Device::There; 4], Some(Ok(0)), Some(1024));
        let mut domain = Domain { controls: false, devices, tried, limit, granted: 300, quarantine: 3, kept: Some(0) };
        let told = |domain: &Domain| xen(Some(domain)).says;
        assert!(told(&domain).ends_with("; 300 of 1024 pages are granted, room for 2 ends of channels with rings of 1 MiB; 3 in quarantine, see tombolo ls"));
        (domain.quarantine, domain.kept) = (0, Some(300));
        assert!(told(&domain).ends_with(
            "room for 1 ends of channels with rings of 1 MiB; tombolod keeps 300 of programs that died, see tombolo ls"
        ));
        domain.kept = None;
        assert!(told(&domain).ends_with("; no tombolod tells what programs that died left mapped"));
        (domain.controls, domain.kept) = (true, Some(0));
        assert!(told(&domain).ends_with("xl debug-keys g; xl dmesg") && !told(&domain).contains("quarantine"));
    }
}
