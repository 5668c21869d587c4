// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the self tests' kernels on whatever driver is there and keeps what they gave.
//!
//! On a GPU it says whether the interpreter, and the hand that computed the results, tell the truth; on the emulated
//! driver it has to agree entirely. The record has, for each kernel, a digest of the kernel and its inputs, what is
//! expected, what the interpreter gives and what the device gives, with machine and date.
//!
//! ```text
//! conformance [--json FILE] [--keep DIR] [--only TEXT]    runs the cases whose family or name contains TEXT
//! conformance --ptx DIR                                   writes the kernels instead, for the device's assembler
//! ```
//!
//! `--keep` puts the record into a folder under the name of device and date; an emulated device's is not kept.

mod driver;
mod record;
#[path = "../../../tests/instructions/table/mod.rs"]
mod table;

use driver::Device;
use record::{Entry, Outcome};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use table::case::Case;

/// For one case, its compilation by the driver included. A kernel that never ends costs itself and the cases behind it:
/// the device is not free before the process ends.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Arguments {
    json: Option<String>,
    keep: Option<String>,
    only: Option<String>,
    ptx: Option<String>,
}

fn arguments() -> Result<Arguments, String> {
    let mut out = Arguments::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let slot = match arg.as_str() {
            "--json" => &mut out.json,
            "--keep" => &mut out.keep,
            "--only" => &mut out.only,
            "--ptx" => &mut out.ptx,
            _ => {
                return Err(format!(
                    "`{arg}`: usage: conformance [--json FILE] [--keep DIR] [--only TEXT] | --ptx DIR"
                ));
            }
        };
        *slot = Some(args.next().ok_or_else(|| format!("{arg} needs a value"))?);
    }
    Ok(out)
}

/// One case on the interpreter and on the device.
fn attempt(device: &Device, case: Case) -> Result<Entry, String> {
    let emulated =
        table::run::interpret(&case, 0, false).map_err(|e| format!("{}: the interpreter: {e}", case.name))?;
    let mut buffer = case.buffer();
    let outcome = if !case.runs_on(device.sm) {
        Outcome::Skipped
    } else {
        match device.run(&case, &mut buffer) {
            Ok(()) => Outcome::Ran(buffer),
            Err(why) => {
                device.recover().map_err(|e| format!("{}: {why}; and then {e}", case.name))?;
                Outcome::Failed(why)
            }
        }
    };
    for w in case.judge(&emulated).iter().take(3) {
        eprintln!("{}: {}: the interpreter gives {:x}, expected is {}", case.name, w.place, w.found, w.want);
    }
    let agrees = match &outcome {
        Outcome::Ran(buffer) => {
            for w in case.judge(buffer).iter().take(3) {
                eprintln!("{}: {}: the device gives {:x}, expected is {}", case.name, w.place, w.found, w.want);
            }
            case.judge(buffer).is_empty() && case.judge(&emulated).is_empty()
        }
        Outcome::Skipped => false,
        Outcome::Failed(why) => {
            eprintln!("{}: {why}", case.name);
            false
        }
    };
    Ok(Entry { case, emulated, device: outcome, agrees })
}

/// What the device's thread sends for each case, as far as it does within `patience` each. What does not has failed.
fn collected(cases: &[Case], sent: &Receiver<Result<Entry, String>>, patience: Duration) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::with_capacity(cases.len());
    for case in cases {
        match sent.recv_timeout(patience) {
            Ok(entry) => entries.push(entry?),
            Err(RecvTimeoutError::Disconnected) => return Err(format!("{}: its thread has ended", case.name)),
            Err(RecvTimeoutError::Timeout) => {
                let why = format!("no answer within {} s, and the cases behind it were not run", patience.as_secs());
                eprintln!("{}: {why}", case.name);
                let emulated = table::run::interpret(case, 0, false)
                    .map_err(|e| format!("{}: {why}; the interpreter: {e}", case.name))?;
                entries.push(Entry { case: case.clone(), emulated, device: Outcome::Failed(why), agrees: false });
                break;
            }
        }
    }
    Ok(entries)
}

fn run() -> Result<bool, String> {
    let args = arguments()?;
    let wanted =
        |c: &Case| args.only.as_ref().is_none_or(|t| c.family.contains(t.as_str()) || c.name.contains(t.as_str()));
    let cases: Vec<Case> = table::all().into_iter().filter(wanted).collect();
    if cases.is_empty() {
        return Err(format!("--only {}: no case is called that", args.only.unwrap_or_default()));
    }
    if let Some(folder) = args.ptx {
        std::fs::create_dir_all(&folder).map_err(|e| format!("{folder}: {e}"))?;
        for (k, c) in cases.iter().enumerate() {
            let path = format!("{folder}/{:04}_{}.{}.ptx", k, c.family, c.target());
            std::fs::write(&path, c.ptx()).map_err(|e| format!("{path}: {e}"))?;
        }
        println!("{} kernels in {folder}", cases.len());
        return Ok(true);
    }
    let cases = Arc::new(cases);
    let (opened, is_open) = channel();
    let (send, sent) = channel();
    let of_device = Arc::clone(&cases);
    // A context belongs to the thread that it was made current in.
    thread::spawn(move || {
        let device = match Device::open() {
            Ok(device) => device,
            Err(error) => return opened.send(Err(error)).unwrap_or_default(),
        };
        let about = (device.name.clone(), device.sm, device.driver.clone());
        opened.send(Ok(about)).unwrap_or_default();
        for case in of_device.iter() {
            if send.send(attempt(&device, case.clone())).is_err() {
                break; // nobody listens any more
            }
        }
    });
    let (name, sm, driver) = is_open.recv().map_err(|_| "the device's thread has ended")??;
    let entries = collected(&cases, &sent, PATIENCE)?;
    let date = record::now();
    let capability = format!("{}.{}", sm / 10, sm % 10);
    let machine = [("device", &name[..]), ("compute_capability", &capability), ("driver", &driver)];
    let text = record::json(&date, machine, &entries);
    if let Some(path) = args.json {
        std::fs::write(&path, &text).map_err(|e| format!("{path}: {e}"))?;
    }
    match args.keep {
        Some(_) if name.contains("emulator") => eprintln!("an emulated device proves nothing: not kept"),
        Some(folder) => {
            let path = format!("{folder}/{}.conformance.json", record::file_name(&name, &date));
            let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, &text));
            written.map_err(|e| format!("{path}: {e}"))?;
        }
        None => {}
    }
    let agree = entries.iter().filter(|e| e.agrees).count();
    let skipped = entries.iter().filter(|e| matches!(e.device, Outcome::Skipped)).count();
    let differ = entries.len() - agree - skipped;
    let left = cases.len() - entries.len();
    let more = if left > 0 { format!(", {left} were not run") } else { String::new() };
    println!("{name}: {agree} of {} cases agree, {differ} differ, {skipped} need a later device{more}", cases.len());
    if left > 0 {
        driver::leave_at_once();
    }
    Ok(differ == 0 && agree > 0)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_without_an_answer_has_failed_and_those_before_it_are_kept() {
        let cases: Vec<Case> = table::all().into_iter().take(3).collect();
        let entry = |case: &Case| {
            let emulated = table::run::interpret(case, 0, false).expect("a case that runs");
            Entry { case: case.clone(), device: Outcome::Ran(emulated.clone()), emulated, agrees: true }
        };
        let (send, sent) = channel();
        send.send(Ok(entry(&cases[0]))).expect("heard");
        let entries = collected(&cases, &sent, Duration::from_millis(10)).expect("entries");
        assert_eq!(entries.iter().map(|e| e.agrees).collect::<Vec<_>>(), [true, false]);
        assert!(matches!(&entries[1].device, Outcome::Failed(why) if why.starts_with("no answer within")));
        assert!(record::json("now", [("device", "none"); 3], &entries).contains("\"error\": \"no answer within"));

        // A device that could not begin anew, and a thread that is gone.
        send.send(Err("no device".into())).expect("heard");
        assert_eq!(collected(&cases, &sent, PATIENCE).err().expect("an error"), "no device");
        drop(send);
        assert!(collected(&cases, &sent, PATIENCE).err().expect("an error").ends_with("its thread has ended"));
    }
}
