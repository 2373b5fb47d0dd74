//! NVIDIA's GPUs, as the driver's `nvidia-smi` reports them. It comes with every driver, and its CSV queries have kept
//! their names for ten years, so nothing has to be linked or loaded. If it is missing, there is no driver.
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use tunesmith_base::error::{Error, Result};

/// One GPU. Values that the driver does not report are none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gpu {
    /// Its number in `nvidia-smi`.
    pub index: usize,
    /// Product name, such as `NVIDIA H200`.
    pub name: String,
    /// Bytes of GPU memory in use.
    pub used: Option<u64>,
    /// Total bytes of GPU memory.
    pub total: Option<u64>,
    /// Its recent utilization in percent.
    pub utilization: Option<u32>,
    /// The compute capability, such as `9.0`.
    pub compute_capability: Option<String>,
    /// The processes that hold memory on it.
    pub processes: Vec<Process>,
}

/// A process that uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The process id, as `nvidia-smi` reports it.
    pub pid: u32,
    /// The path of the program.
    pub name: String,
    /// Bytes that it holds on the device.
    pub bytes: Option<u64>,
}

/// All GPUs and their links.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Nvidia {
    /// The version of the NVIDIA driver.
    pub driver: Option<String>,
    /// The newest CUDA version that the driver supports.
    pub cuda: Option<String>,
    /// The GPUs, in the order of their numbers.
    pub gpus: Vec<Gpu>,
    /// The connection between two GPUs, such as `NV18` (NVLink) or `PHB`: `links[i][j]`.
    pub links: Vec<Vec<String>>,
}

const GPU_QUERY: &str =
    "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total,utilization.gpu,compute_cap";
const PROCESS_QUERY: &str = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name";
const FORMAT: &str = "--format=csv,noheader,nounits";

/// The meanings of the words in [`Nvidia::links`], from `nvidia-smi topo`.
pub const LINKS: &str = "NV#: # links of NVLink; PIX, PXB: PCIe switches; PHB: a PCIe host bridge; NODE, SYS: between host \
                         bridges or processors";

impl Nvidia {
    /// Runs `nvidia-smi`, whose path is `program`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: it fails; the message has its output.
    pub fn ask(program: &Path) -> Result<Self> {
        let run = |args: &[&str]| -> Result<String> {
            let output =
                Command::new(program).args(args).output().map_err(|source| Error::io("run", program, &source))?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() {
                return Ok(text);
            }
            let said = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
            let said = said.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
            Err(Error::new(tunesmith_base::Kind::Io, format!("{}: {said}", program.display()))
                .hint("the driver does not run: `nvidia-smi` must work first"))
        };
        let gpus = run(&[GPU_QUERY, FORMAT])?;
        // These are extras: a driver that lacks them still has its GPUs.
        let processes = run(&[PROCESS_QUERY, FORMAT]).unwrap_or_default();
        let summary = run(&[]).unwrap_or_default();
        let links = run(&["topo", "-m"]).unwrap_or_default();
        Ok(Self::parse(&gpus, &processes, &summary, &links))
    }

    /// Parses the queries for GPUs and processes, the summary page and the topology.
    fn parse(gpus: &str, processes: &str, summary: &str, links: &str) -> Self {
        let mut found = Self { cuda: after(summary, "CUDA Version:"), links: parse_links(links), ..Self::default() };
        let mut by_id: BTreeMap<&str, usize> = BTreeMap::new();
        for line in gpus.lines() {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let [index, id, ref name @ .., driver, used, total, utilization, capability] = fields[..] else { continue };
            let Ok(index) = index.parse() else { continue };
            by_id.insert(id, found.gpus.len());
            found.driver = known(driver);
            found.gpus.push(Gpu {
                index,
                name: name.join(", "),
                used: mebibytes(used),
                total: mebibytes(total),
                utilization: utilization.parse().ok(),
                compute_capability: known(capability),
                processes: Vec::new(),
            });
        }
        for line in processes.lines() {
            let mut fields = line.splitn(4, ',').map(str::trim);
            let (Some(id), Some(pid), Some(used), Some(name)) =
                (fields.next(), fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if let (Some(&gpu), Ok(pid)) = (by_id.get(id), pid.parse()) {
                found.gpus[gpu].processes.push(Process { pid, name: name.to_owned(), bytes: mebibytes(used) });
            }
        }
        found
    }
}

/// A value, unless the driver reports in brackets that it has none.
fn known(text: &str) -> Option<String> {
    (!text.is_empty() && !text.starts_with('[') && text != "N/A").then(|| text.to_owned())
}

fn mebibytes(text: &str) -> Option<u64> {
    text.parse::<u64>().ok()?.checked_mul(1 << 20)
}

/// The word after a label.
fn after(text: &str, label: &str) -> Option<String> {
    let word = text.split_once(label)?.1.split_whitespace().next()?;
    known(word.trim_end_matches('|'))
}

/// The matrix of words of `nvidia-smi topo -m`.
fn parse_links(text: &str) -> Vec<Vec<String>> {
    let plain = without_escapes(text);
    let is_gpu = |word: &str| word.strip_prefix("GPU").is_some_and(|number| number.parse::<u32>().is_ok());
    let mut lines = plain.lines().map(|line| line.split('\t').map(str::trim).collect::<Vec<_>>());
    let Some(columns) = lines.find(|words| words.iter().any(|word| is_gpu(word))) else { return Vec::new() };
    let count = columns.iter().filter(|word| is_gpu(word)).count();
    let rows = lines.filter(|words| words.first().is_some_and(|word| is_gpu(word)));
    rows.map(|words| words.into_iter().skip(1).take(count).map(str::to_owned).collect()).collect()
}

/// Removes the terminal's escape sequences, which newer drivers write even into a pipe.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(letter) = chars.next() {
        if letter == '\x1b' {
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(letter);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPUS: &str = "0, GPU-5ee8, NVIDIA H100 80GB HBM3, 580.65.06, 4, 81559, 0, 9.0\n\
                        1, GPU-77ab, NVIDIA H100 80GB HBM3, 580.65.06, 1034, 81559, 97, 9.0\n\
                        2, GPU-odd, Odd, with comma, 580.65.06, [N/A], [Not Supported], [N/A], [N/A]\n";
    const PROCESSES: &str = "GPU-77ab, 4242, 1016, /usr/bin/tunesmith, train\nGPU-none, 1, 2, lost\n";
    const SUMMARY: &str = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0     |\n";
    const TOPOLOGY: &str = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n\
                            GPU0\t X \tNV18\tPIX\t0-55,112-167\t0\t\tN/A\n\
                            GPU1\tNV18\t X \tNODE\t0-55,112-167\t0\t\tN/A\n\
                            NIC0\tPIX\tNODE\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n";

    #[test]
    fn answers_in_the_form_of_a_driver_are_read() {
        let found = Nvidia::parse(GPUS, PROCESSES, SUMMARY, TOPOLOGY);
        assert_eq!((found.driver.as_deref(), found.cuda.as_deref()), (Some("580.65.06"), Some("13.0")));
        assert_eq!(found.gpus.len(), 3);
        let busy = &found.gpus[1];
        assert_eq!((busy.used, busy.total, busy.utilization), (Some(1034 << 20), Some(81559 << 20), Some(97)));
        assert_eq!((busy.name.as_str(), busy.compute_capability.as_deref()), ("NVIDIA H100 80GB HBM3", Some("9.0")));
        let process = Process { pid: 4242, name: "/usr/bin/tunesmith, train".into(), bytes: Some(1016 << 20) };
        assert_eq!(busy.processes, [process]);
        let odd = &found.gpus[2];
        assert_eq!(odd.name, "Odd, with comma");
        assert_eq!((odd.used, odd.total, odd.utilization, odd.compute_capability.as_ref()), (None, None, None, None));
        assert_eq!(found.links, [["X", "NV18"], ["NV18", "X"]]);
    }

    #[test]
    fn nonsense_is_no_gpu() {
        let found = Nvidia::parse("No devices were found\n,,,,,,,\n", "x", "CUDA Version: N/A |", "no table");
        assert_eq!(found, Nvidia::default());
    }
}
