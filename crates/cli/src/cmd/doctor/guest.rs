// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Examines what a virtual machine under QEMU needs besides: devices, the driver, cached memory, the broker.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use rustix::fs::Access;
use tombolo_inspect::{known_groups, known_users, name_of, programs_socket};

use super::finding::{Finding, Grade};
use crate::cmd::link;

/// Name of the kernel module as a driver.
const DRIVER: &str = "tombolo_ivshmem";
/// Address below which firmware leaves devices' memory uncached, which no driver can change.
const CACHED_FROM: u64 = 4 << 30;

/// An ivshmem device on the PCI bus.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    pub address: String,
    /// Name of the driver that has the device.
    pub driver: Option<String>,
    /// Whether the device has interrupts: it is then the doorbell, and not memory.
    pub is_doorbell: bool,
    /// Address of its memory.
    pub memory: u64,
    /// State that the driver reports, if it is Tombolo's.
    pub driven: Option<Driven>,
}

/// Device as the kernel module has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Driven {
    /// Name of its node.
    pub node: String,
    /// Whether its memory is mapped write-back.
    pub write_back: bool,
    /// Number of interrupts that came.
    pub interrupts: u64,
    /// Number of times that too many came, and were held back.
    pub storms: u64,
}

/// Parts of such a machine that are here.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Guest {
    pub devices: Vec<Device>,
    /// Whether the module is loaded.
    pub module: bool,
    /// Owners who may open the doorbell's node, if this user may not.
    pub closed: Option<String>,
    /// The broker's name for this machine, or why it does not answer; `None` if there are no devices to ask for.
    pub broker: Option<Result<String, String>>,
}

/// Examines the machine whose sysfs is at `sys`.
pub fn probe(sys: &Path) -> Guest {
    let bus = sys.join("bus/pci");
    let entries = fs::read_dir(bus.join("devices")).into_iter().flatten().flatten();
    let mut devices: Vec<_> = entries.filter_map(|entry| device(&entry.path())).collect();
    devices.sort_by(|a, b| a.address.cmp(&b.address));
    let module = bus.join("drivers").join(DRIVER).is_dir();
    let broker = (!devices.is_empty()).then(|| link::name_of(&programs_socket()).map_err(|error| error.to_string()));
    let doorbell = devices.iter().filter(|device| device.is_doorbell).find_map(|device| device.driven.as_ref());
    let closed = doorbell.and_then(|doorbell| closed(&Path::new("/dev").join(&doorbell.node)));
    Guest { devices, module, closed, broker }
}

/// Describes who may open a node, if this user may not.
fn closed(node: &Path) -> Option<String> {
    rustix::fs::access(node, Access::READ_OK | Access::WRITE_OK).err()?;
    let of = fs::metadata(node).ok()?;
    let user = name_of(of.uid(), &known_users());
    let group = name_of(of.gid(), &known_groups());
    Some(format!("{} is for user {user} and group {group}", node.display()))
}

/// Reads what the module publishes below the device at `folder`.
fn driven(folder: &Path) -> Option<Driven> {
    let entry = fs::read_dir(folder.join("misc")).ok()?.flatten().next()?;
    let says = |file: &str| fs::read_to_string(entry.path().join(file)).ok()?.trim().parse::<u64>().ok();
    Some(Driven {
        node: entry.file_name().to_string_lossy().into_owned(),
        write_back: says("write_back")? != 0,
        interrupts: says("interrupts")?,
        storms: says("storms")?,
    })
}

fn device(folder: &Path) -> Option<Device> {
    let says = |file: &str, id: &str| fs::read_to_string(folder.join(file)).is_ok_and(|found| found.trim() == id);
    if !says("vendor", "0x1af4") || !says("device", "0x1110") {
        return None;
    }
    // A line for each window of the device: its first and last address and its kind.
    let windows = fs::read_to_string(folder.join("resource")).unwrap_or_default();
    let first = |number: usize| {
        let start = windows.lines().nth(number)?.split_whitespace().next()?.strip_prefix("0x")?;
        u64::from_str_radix(start, 16).ok()
    };
    let driver = fs::read_link(folder.join("driver")).ok();
    let driver = driver.and_then(|driver| Some(driver.file_name()?.to_string_lossy().into_owned()));
    let address = folder.file_name()?.to_string_lossy().into_owned();
    let (is_doorbell, memory) = (first(1).is_some_and(|at| at != 0), first(2).unwrap_or(0));
    Some(Device { address, driver, is_doorbell, memory, driven: driven(folder) })
}

/// Judges the devices and their driver.
pub fn ivshmem(guest: &Guest) -> Finding {
    let named =
        |devices: Vec<&Device>| devices.iter().map(|device| device.address.as_str()).collect::<Vec<_>>().join(", ");
    let those = |is: &dyn Fn(&Device) -> bool| guest.devices.iter().filter(|device| is(device)).collect::<Vec<_>>();
    let wrong = |says: String| Finding::new("ivshmem", Grade::Warning, says);
    if guest.devices.is_empty() {
        return Finding::new("ivshmem", Grade::Info, "ivshmem devices on the PCI bus: none");
    }
    if !guest.module {
        return wrong(format!("no driver for {}: the kernel module is not loaded", named(those(&|_| true))))
            .mend(format!("modprobe {DRIVER} (from kernel/ivshmem, by DKMS)"));
    }
    let other = those(&|device| device.driver.as_deref() != Some(DRIVER));
    if let Some(first) = other.first() {
        let (at, bus) = (&first.address, "/sys/bus/pci");
        let unbind = first.driver.as_ref().map(|_| format!("echo {at} > {bus}/devices/{at}/driver/unbind; "));
        return wrong(format!("the driver {DRIVER} has not {}", named(other))).mend(format!(
            "{}echo {at} > {bus}/drivers/{DRIVER}/bind; dmesg says why not",
            unbind.unwrap_or_default()
        ));
    }
    if !guest.devices.iter().any(|device| device.is_doorbell) {
        return wrong(format!("{}: memory, and no ivshmem-doorbell device to ring with", named(those(&|_| true))))
            .mend("`tombolo link snippet NAME` on the host says what QEMU needs");
    }
    let is_cached =
        |device: &Device| device.driven.as_ref().map_or(device.memory >= CACHED_FROM, |driven| driven.write_back);
    let uncached = those(&|device| !device.is_doorbell && !is_cached(device));
    if let Some(first) = uncached.first() {
        let why = match first.memory < CACHED_FROM {
            true => "it is below 4 GiB, where firmware forbids to cache it",
            false => "another driver, or a range register of the processor, has it so",
        };
        let says = format!("the memory of {} is not write-back cached: {why}; it works and crawls", named(uncached));
        return wrong(says).mend(
            "have the host plug it in once the machine is up, or make it 1 GiB large; /proc/mtrr says the ranges",
        );
    }
    Finding::new("ivshmem", Grade::Ok, format!("the driver has {}, write-back cached", named(those(&|_| true))))
}

/// Judges the interrupts that come in by the doorbell.
pub fn interrupts(guest: &Guest) -> Finding {
    let doorbell = guest.devices.iter().filter(|device| device.is_doorbell).find_map(|device| device.driven.as_ref());
    let (grade, says) = match doorbell {
        None => (Grade::Info, "no doorbell of the driver's, so no interrupts".into()),
        Some(Driven { interrupts, storms: 0, .. }) => {
            (Grade::Ok, format!("{interrupts} interrupts came, none too many"))
        }
        Some(Driven { interrupts, storms, .. }) => (
            Grade::Info,
            format!(
                "{interrupts} interrupts came, and were held back {storms} times: a peer rang without end. \
                 `tombolo link ls` on the host says who"
            ),
        ),
    };
    Finding::new("interrupts", grade, says)
}

/// Judges the broker of this machine.
pub fn broker(guest: &Guest) -> Finding {
    match &guest.broker {
        None => {
            Finding::new("broker", Grade::Info, "no ivshmem devices, so nothing for a broker of this machine to do")
        }
        Some(Ok(name)) => {
            Finding::new("broker", Grade::Ok, format!("the broker answers; this machine is called {name}"))
        }
        Some(Err(why)) => {
            let finding = Finding::new("broker", Grade::Warning, format!("the broker does not answer: {why}"));
            match &guest.closed {
                None => finding.mend("systemctl start tombolod-guest, or: tombolod --guest"),
                Some(whose) => finding.mend(format!(
                    "systemctl start tombolod-guest. By hand it is not yours to start: {whose}. Programs need neither; \
                     whoever runs the broker does: usermod -aG tombolo NAME, with the udev rule 60-tombolo.rules"
                )),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_that_this_user_may_not_open_is_said_with_its_owners() {
        let folder = tempfile::tempdir().unwrap();
        let node = folder.path().join("node");
        fs::write(&node, "").unwrap();
        assert_eq!(closed(&node), None);
        assert_eq!(closed(&folder.path().join("none")), None, "that is another finding");
    }

    fn put(folder: &Path, id: &str, windows: &str) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("vendor"), "0x1af4\n").unwrap();
        fs::write(folder.join("device"), format!("{id}\n")).unwrap();
        fs::write(folder.join("resource"), windows).unwrap();
    }

    #[test]
    fn ivshmem_devices_are_told_from_others_and_from_each_other() {
        let sys = tempfile::tempdir().unwrap();
        let (bus, none) = (sys.path().join("bus/pci"), "0x0000000000000000 0x0000000000000000 0x0000000000000000\n");
        let (low, high) =
            ("0x00000000febd1000 0x00000000febd1fff 0x200\n", "0x000000c000000000 0xc000ffffff 0x14220c\n");
        put(&bus.join("devices/0000:00:05.0"), "0x1110", &[low, low, high].concat());
        put(&bus.join("devices/0000:00:06.0"), "0x1110", &[low, none, low].concat());
        put(&bus.join("devices/0000:00:07.0"), "0x1000", low);
        let misc = bus.join("devices/0000:00:05.0/misc/tombolo0");
        fs::create_dir_all(&misc).unwrap();
        for (file, says) in [("write_back", "1\n"), ("interrupts", "12\n"), ("storms", "3\n")] {
            fs::write(misc.join(file), says).unwrap();
        }
        let driver = bus.join("drivers").join(DRIVER);
        fs::create_dir_all(&driver).unwrap();
        std::os::unix::fs::symlink(&driver, bus.join("devices/0000:00:05.0/driver")).unwrap();
        let guest = probe(sys.path());
        let device = |address: &str, driver: Option<&str>, is_doorbell, memory| Device {
            address: address.into(),
            driver: driver.map(Into::into),
            is_doorbell,
            memory,
            driven: None,
        };
        let driven = Driven { node: "tombolo0".into(), write_back: true, interrupts: 12, storms: 3 };
        let doorbell = device("0000:00:05.0", Some(DRIVER), true, 0xc0_0000_0000);
        let doorbell = Device { driven: Some(driven), ..doorbell };
        assert_eq!(guest.devices, [doorbell, device("0000:00:06.0", None, false, 0xfebd_1000)]);
        assert!(guest.module && probe(Path::new("/nowhere")) == Guest::default());
        assert!(guest.broker.is_some_and(|broker| broker.is_err()));
    }
}
