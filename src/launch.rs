//! What a launcher says about this process: which rank it is, of how many, and where the ranks meet.
//!
//! | launcher | rank, ranks, number on this machine |
//! |---|---|
//! | torchrun | RANK, WORLD_SIZE, LOCAL_RANK |
//! | Slurm (srun) | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, when SLURM_STEP_ID is set |
//! | Open MPI | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK |
//! | other MPI | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID |
//!
//! They meet at MASTER_ADDR and MASTER_PORT; without, under Slurm at the first node of its list. Several launchers may speak (mpirun in a Slurm job): they must
//! agree, but for one that started a single process, in which another one was started (torchrun in a Slurm step of one task).

/// Port of the meeting place unless MASTER_PORT names one.
const PORT: u16 = 29500;

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub rank: u32,
    pub ranks: u32,
    /// Its number among the processes of this machine.
    pub local: u32,
    pub host: String,
    pub port: u16,
}

/// A launcher's variables: of rank, ranks and local number; and one that must be there too, if any.
struct Launcher {
    name: &'static str,
    variables: [&'static str; 3],
    only_with: Option<&'static str>,
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher { name: "torchrun", variables: ["RANK", "WORLD_SIZE", "LOCAL_RANK"], only_with: None },
    Launcher {
        name: "Slurm",
        variables: ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
        only_with: Some("SLURM_STEP_ID"),
    },
    Launcher {
        name: "Open MPI",
        variables: ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
        only_with: None,
    },
    Launcher { name: "MPI", variables: ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"], only_with: None },
];

/// What the environment says; none without a launcher, or for a single process.
///
/// # Errors
/// One sentence: a variable that is missing beside others, no number, out of range; launchers that contradict each other; no meeting place.
pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, String> {
    let mut found: Option<(&str, [u32; 3])> = None;
    for launcher in &LAUNCHERS {
        let Some(numbers) = numbers(launcher, &get)?.filter(|numbers| numbers[1] > 1) else { continue };
        match found {
            Some((name, before)) if before[..2] != numbers[..2] => {
                return Err(format!(
                    "{name} says that this is rank {} of {}, and {} says rank {} of {}: start with one of them, or unset the variables of the other ({})",
                    before[0],
                    before[1],
                    launcher.name,
                    numbers[0],
                    numbers[1],
                    launcher.variables.join(", ")
                ));
            }
            Some(_) => {}
            None => found = Some((launcher.name, numbers)),
        }
    }
    let Some((name, [rank, ranks, local])) = found else { return Ok(None) };
    let (host, port) = meeting_place(name, &get)?;
    Ok(Some(Launch { rank, ranks, local, host, port }))
}

fn numbers(launcher: &Launcher, get: &impl Fn(&str) -> Option<String>) -> Result<Option<[u32; 3]>, String> {
    let values = launcher.variables.map(get);
    if values[0].is_none() || launcher.only_with.is_some_and(|name| get(name).is_none()) {
        return Ok(None);
    }
    let mut numbers = [0; 3];
    for ((number, value), variable) in numbers.iter_mut().zip(values).zip(launcher.variables) {
        let value = value.ok_or_else(|| {
            format!("{} is set and {variable} is not: {} sets both", launcher.variables[0], launcher.name)
        })?;
        *number = value.trim().parse().map_err(|_| format!("{variable} is `{value}`, which is no number"))?;
    }
    let [rank, ranks, _] = numbers;
    if rank >= ranks {
        return Err(format!("{} says that this is rank {rank} of {ranks} (ranks count from 0)", launcher.name));
    }
    Ok(Some(numbers))
}

fn meeting_place(launcher: &str, get: &impl Fn(&str) -> Option<String>) -> Result<(String, u16), String> {
    let nodes = || get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST")).map(|list| first_node(&list));
    let host = get("MASTER_ADDR").or_else(nodes).ok_or_else(|| {
        format!("{launcher} started several processes, and nothing says where they meet: set MASTER_ADDR to the host of rank 0 (and MASTER_PORT)")
    })?;
    let port = match get("MASTER_PORT") {
        Some(port) => port.trim().parse().map_err(|_| format!("MASTER_PORT is `{port}`, which is no port"))?,
        None => PORT,
    };
    Ok((host, port))
}

/// The first host of Slurm's `gpu[03-05,9],other`: `gpu03`.
fn first_node(list: &str) -> String {
    let Some((start, rest)) = list.split_once('[').filter(|(start, _)| !start.contains(',')) else {
        return list.split(',').next().unwrap_or(list).to_owned();
    };
    let first = rest.split([',', '-', ']']).next().unwrap_or_default();
    format!("{start}{first}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Launch>, String> {
        read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    fn launch(rank: u32, ranks: u32, local: u32, host: &str, port: u16) -> Result<Option<Launch>, String> {
        Ok(Some(Launch { rank, ranks, local, host: host.into(), port }))
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "1234")];

    #[test]
    fn every_launcher_is_read() {
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&TORCHRUN), launch(5, 8, 1, "node7", 1234));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_JOB_NODELIST", "gpu[03-05,9],other"),
        ];
        assert_eq!(of(&slurm), Ok(None), "the batch script itself is no task");
        assert_eq!(of(&[&slurm[..], &[("SLURM_STEP_ID", "0")]].concat()), launch(3, 4, 3, "gpu03", PORT));
        let mpi = |start: [&'static str; 3]| [(start[0], "1"), (start[1], "2"), (start[2], "0"), ("MASTER_ADDR", "a")];
        for launcher in &LAUNCHERS[2..] {
            assert_eq!(of(&mpi(launcher.variables)), launch(1, 2, 0, "a", PORT));
        }
        assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]), Ok(None), "one process is none");
        let step = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0")];
        assert_eq!(of(&[&TORCHRUN[..], &step].concat()), launch(5, 8, 1, "node7", 1234), "in a step of one task");
    }

    #[test]
    fn what_contradicts_itself_or_is_missing_is_one_sentence() {
        let with = |more: &[(&'static str, &'static str)]| of(&[&TORCHRUN[..], more].concat()).unwrap_err();
        let mpi =
            with(&[("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")]);
        assert!(mpi.contains("rank 5 of 4 (ranks count from 0)"), "{mpi}");
        let mpi = with(&[("PMI_RANK", "5"), ("PMI_SIZE", "16"), ("MPI_LOCALRANKID", "0")]);
        assert!(mpi.contains("torchrun says that this is rank 5 of 8, and MPI says rank 5 of 16"), "{mpi}");
        let cases = [
            (vec![("RANK", "1")], "RANK is set and WORLD_SIZE is not"),
            (vec![("RANK", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")], "RANK is `x`, which is no number"),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")], "rank 2 of 2"),
            (vec![("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")], "set MASTER_ADDR"),
        ];
        for (variables, expected) in cases {
            let said = of(&variables).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn the_first_node_of_slurms_list() {
        let cases = [("a", "a"), ("a1,b[2-3]", "a1"), ("gpu[7]", "gpu7"), ("n[010-020]", "n010"), ("x[1,5]", "x1")];
        cases.iter().for_each(|(list, first)| assert_eq!(first_node(list), *first));
    }
}
