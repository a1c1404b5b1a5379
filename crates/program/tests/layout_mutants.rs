//! Faults of the kinds that trainers with tensor, sequence and pipeline parallelism have had, put
//! into correct programs. The checker refuses all of them, each for its reason.
//!
//! The kinds follow Megatron-LM's issue 7452: sums over wrong groups, sums twice or not at all,
//! replicated weights whose gradients are not summed, losses that are normalised locally, norms
//! that count per rank. The programs are those of all ranks: a fault in the lowering is one on
//! every rank.

mod split;

use trainyard_program::{
    Action, Axes, Axis, BackwardPart, CheckError, Collective, Keep, Layout, Mesh, Phase, PipelineSchedule, Program,
    Strategy, check_ranks, lower_all,
};

/// A correct set of programs.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Base {
    /// Sequence parallelism: tensor degree 2, two replicas of two shards, ZeRO-1.
    Sequence,
    /// The same without sequence parallelism.
    Tensor,
    /// Sequence parallelism in two pipeline stages that share the embedding.
    Stages,
    /// The same with backwards in two halves.
    Halves,
    /// Context degree 2, two replicas of two shards, ZeRO-1.
    Context,
    /// The same with nothing sharded.
    Copies,
    /// Context and tensor degree 2, sequence parallelism, two shards.
    Both,
}

fn programs(base: Base) -> Vec<Program> {
    let mut strategy = Strategy { accumulation_steps: 2, zero_stage: 1, ..Strategy::new(4) };
    strategy.keep[2] = Keep::InputOnly;
    let mesh = match base {
        Base::Sequence | Base::Tensor => Mesh { tp: 2, dp_shard: 2, dp_replicate: 2, ..Mesh::default() },
        Base::Stages | Base::Halves => Mesh { tp: 2, dp_shard: 2, pp: 2, ..Mesh::default() },
        Base::Context => Mesh { cp: 2, dp_shard: 2, dp_replicate: 2, ..Mesh::default() },
        Base::Copies => Mesh { cp: 2, dp_replicate: 2, ..Mesh::default() },
        Base::Both => Mesh { cp: 2, tp: 2, dp_shard: 2, ..Mesh::default() },
    };
    if base == Base::Halves {
        strategy.pipeline = PipelineSchedule::ZeroBubble.into();
    }
    if base == Base::Copies {
        strategy.zero_stage = 0;
    }
    let shapes = split::group(2, mesh.tp, mesh.cp, base != Base::Tensor, true);
    lower_all(|tp| &shapes[tp as usize], &mesh, &strategy).unwrap()
}

/// The variant of an error, and its words.
fn kind(error: &CheckError) -> (&'static str, String) {
    let kind = match error {
        CheckError::OfRank { error, .. } => return kind(error),
        CheckError::Layout { .. } => "layout",
        CheckError::Rule { .. } => "rule",
        CheckError::Order { .. } => "order",
        CheckError::Unordered { .. } => "unordered",
        CheckError::Leftover(_) => "leftover",
        CheckError::Disagree { .. } => "disagree",
        CheckError::Deadlock(_) => "deadlock",
        CheckError::NoSuch { .. } => "no such",
        CheckError::Malformed(_) | CheckError::WaitsForward { .. } => "malformed",
    };
    (kind, error.to_string())
}

/// The first instruction that meets a condition.
fn find(program: &Program, is_it: impl Fn(&Action) -> bool) -> Option<usize> {
    program.instructions.iter().position(|instruction| is_it(&instruction.action))
}

/// True for the exchange of a block's, or the head's, value of this name (micro-batch 0).
fn exchanges<'a>(program: &'a Program, unit: &'a str, name: &'a str, in_phase: Phase) -> impl Fn(&Action) -> bool + 'a {
    move |action| match *action {
        Action::Exchange { unit: of, micro_batch: 0, phase, border, .. } => {
            let split = program.split_of(of).unwrap();
            let value = &split.values[split.borders[border as usize].from as usize];
            program.units[of as usize] == unit && value.name == name && phase == in_phase
        }
        _ => false,
    }
}

/// Takes an instruction out. Those that waited for it wait for what it waited for.
fn drop_at(program: &mut Program, at: usize) {
    let lane = program.instructions[at].action.lane();
    let before = program.on_lane(lane).take_while(|number| *number < at).last();
    let gone = program.instructions.remove(at);
    for instruction in &mut program.instructions {
        if let Some(place) = instruction.after.iter().position(|on| *on as usize == at) {
            instruction.after.remove(place);
            instruction.after.extend(gone.after.iter().copied().chain(before.map(|before| before as u32)));
        }
        instruction.after.iter_mut().filter(|on| **on as usize > at).for_each(|on| *on -= 1);
    }
}

/// Moves an instruction to another place. Those that waited for it and come before it now wait for
/// what it waited for.
fn move_to(program: &mut Program, from: usize, to: usize) {
    let mut order: Vec<usize> = (0..program.instructions.len()).collect();
    let moved = order.remove(from);
    order.insert(to, moved);
    let place = |old: u32| order.iter().position(|number| *number == old as usize).unwrap() as u32;
    let waited_for: Vec<u32> = program.instructions[from].after.iter().map(|on| place(*on)).collect();
    let mut instructions: Vec<_> = order.iter().map(|number| program.instructions[*number].clone()).collect();
    for (number, instruction) in (0..).zip(&mut instructions) {
        instruction.after = instruction.after.iter().map(|on| place(*on)).collect();
        if instruction.after.iter().any(|on| *on >= number) {
            instruction.after.extend(&waited_for);
            instruction.after.retain(|on| *on < number);
        }
    }
    program.instructions = instructions;
}

/// Runs an instruction twice. Those that waited for it wait for its second run.
fn repeat(program: &mut Program, at: usize) {
    let mut copy = program.instructions[at].clone();
    copy.effects.clear();
    for instruction in &mut program.instructions {
        instruction.after.iter_mut().filter(|on| **on as usize >= at).for_each(|on| *on += 1);
    }
    program.instructions.insert(at + 1, copy);
}

/// Exchanges the actions of two instructions that leave their dependencies where they are.
fn swap_actions(program: &mut Program, a: usize, b: usize) {
    program.instructions.swap(a, b);
    let after = std::mem::take(&mut program.instructions[a].after);
    program.instructions[a].after = std::mem::replace(&mut program.instructions[b].after, after);
}

type Change = Box<dyn Fn(&mut Program)>;

struct Mutant {
    name: String,
    base: Base,
    change: Change,
    kind: &'static str,
    reason: &'static str,
    /// The one rank that is changed; None: all.
    rank: Option<usize>,
}

#[derive(Default)]
struct Mutants(Vec<Mutant>);

impl Mutants {
    fn add(
        &mut self,
        base: Base,
        name: impl Into<String>,
        (kind, reason): (&'static str, &'static str),
        change: impl Fn(&mut Program) + 'static,
    ) {
        self.0.push(Mutant { name: name.into(), base, change: Box::new(change), kind, reason, rank: None });
    }

    /// Changes the first action that is `is_it`.
    fn edit(
        &mut self,
        base: Base,
        name: &str,
        refused: (&'static str, &'static str),
        is_it: impl Fn(&Action) -> bool + 'static,
        edit: impl Fn(&mut Action) + 'static,
    ) {
        self.add(base, name, refused, move |program| {
            if let Some(at) = find(program, &is_it) {
                edit(&mut program.instructions[at].action);
            }
        });
    }

    fn exchange(
        &mut self,
        base: Base,
        name: &str,
        refused: (&'static str, &'static str),
        (unit, value, phase): (&'static str, &'static str, Phase),
        change: impl Fn(&mut Program, usize) + 'static,
    ) {
        self.add(base, format!("{name}: {value} of {unit}, {phase:?}"), refused, move |program| {
            if let Some(at) = find(program, exchanges(program, unit, value, phase)) {
                change(program, at);
            }
        });
    }

    /// Changes the declared layout of a value of all ranks' units of this name.
    fn declare(
        &mut self,
        base: Base,
        name: &str,
        reason: (&'static str, &'static str),
        unit: &'static str,
        layouts: &'static [(&'static str, Layout)],
    ) {
        self.add(base, name, reason, move |program| {
            let at = program.units.iter().position(|name| name == unit).unwrap();
            for (value, layout) in layouts {
                let values = &mut program.splits[at].values;
                values.iter_mut().find(|of| of.name == *value).unwrap().layout = *layout;
            }
        });
    }
}

impl Mutants {
    /// Changes the declared layout over the context axis of values of all ranks' units of this
    /// name.
    fn declare_context(
        &mut self,
        base: Base,
        name: &str,
        reason: (&'static str, &'static str),
        unit: &'static str,
        layouts: &'static [(&'static str, Layout)],
    ) {
        self.add(base, name, reason, move |program| {
            let at = program.units.iter().position(|name| name == unit).unwrap();
            for (value, layout) in layouts {
                let values = &mut program.splits[at].values;
                values.iter_mut().find(|of| of.name == *value).unwrap().context = *layout;
            }
        });
    }
}

fn set_collective(program: &mut Program, at: usize, to: Collective) {
    if let Action::Exchange { collective, .. } = &mut program.instructions[at].action {
        *collective = to;
    }
}

fn set_axis(program: &mut Program, at: usize, to: Axis) {
    match &mut program.instructions[at].action {
        Action::Exchange { axis, .. }
        | Action::Tie { axis, .. }
        | Action::Reduce { axis, .. }
        | Action::Count { axis } => {
            *axis = to;
        }
        _ => {}
    }
}

fn axes(list: &[Axis]) -> Axes {
    list.iter().copied().collect()
}

const F: Phase = Phase::Forward;
const B: Phase = Phase::Backward;

/// Collectives at borders: kind, axis, number, order.
fn at_borders(all: &mut Mutants) {
    use Collective::{AllGather, AllReduce, ReduceScatter};
    for axis in [Axis::Data, Axis::World, Axis::Shard, Axis::Pipeline] {
        let name = format!("gathered over {}", axis.name());
        let wrong = ("layout", "does not belong over");
        all.exchange(Base::Sequence, &name, wrong, ("block.0", "h", F), move |p, at| set_axis(p, at, axis));
    }
    let gradient = ("block.0", "h2", B);
    all.exchange(
        Base::Tensor,
        "gradient summed over data",
        ("layout", "does not belong over data"),
        gradient,
        |p, at| {
            set_axis(p, at, Axis::Data);
        },
    );
    let kinds = [
        (Base::Sequence, ("block.0", "h", F), ReduceScatter, "by all-gather here, not by reduce-scatter"),
        (Base::Sequence, ("block.1", "a", F), AllReduce, "by reduce-scatter here, not by all-reduce"),
        (Base::Sequence, ("embedding", "e", F), AllGather, "by reduce-scatter here, not by all-gather"),
        (Base::Sequence, ("block.0", "h2", B), AllReduce, "by reduce-scatter here, not by all-reduce"),
        (Base::Sequence, ("block.0", "b", B), ReduceScatter, "by all-gather here, not by reduce-scatter"),
        (Base::Sequence, ("head", "s", F), AllReduce, "by all-gather here, not by all-reduce"),
        (Base::Tensor, ("block.0", "a", F), ReduceScatter, "by all-reduce here, not by reduce-scatter"),
        (Base::Tensor, ("head", "h", B), AllGather, "by all-reduce here, not by all-gather"),
    ];
    for (base, at, collective, reason) in kinds {
        all.exchange(base, "another collective", ("layout", reason), at, move |p, at| {
            set_collective(p, at, collective)
        });
    }
    let missing = [
        (Base::Tensor, ("block.0", "a", F), "rejoin needs a', which is not there as invariant"),
        (Base::Tensor, ("block.1", "b", F), "output needs b', which is not there as invariant"),
        (Base::Tensor, ("embedding", "e", F), "positions needs e', which is not there as invariant"),
        (Base::Sequence, ("block.0", "h2", F), "mlp needs h2', which is not there as replicated"),
        (Base::Sequence, ("embedding", "e", F), "positions needs e', which is not there as split"),
        (Base::Sequence, ("head", "s", F), "loss needs s', which is not there as invariant"),
        (Base::Tensor, ("block.0", "h2", B), "rejoin needs the gradient of h2"),
        (Base::Tensor, ("block.0", "h", B), "norm needs the gradient of h"),
        (Base::Tensor, ("head", "h", B), "norm needs the gradient of h"),
        (Base::Sequence, ("block.1", "b", B), "mlp needs the gradient of b"),
        (Base::Sequence, ("embedding", "e", B), "lookup needs the gradient of e"),
        (Base::Halves, ("block.0", "a", B), "attention needs the gradient of a"),
    ];
    for (base, at, reason) in missing {
        all.exchange(base, "no exchange", ("layout", reason), at, drop_at);
    }
    let again = "has changed its layout already";
    for (base, at) in [
        (Base::Sequence, ("block.0", "a", F)),
        (Base::Tensor, ("block.0", "b", F)),
        (Base::Tensor, ("block.0", "h", B)),
        (Base::Sequence, ("head", "h", B)),
        (Base::Halves, ("block.0", "h2", B)),
    ] {
        all.exchange(base, "exchanged twice", ("layout", again), at, repeat);
    }
    all.exchange(Base::Sequence, "priced twice", ("layout", "does not belong"), ("block.0", "h", F), |p, at| {
        if let Action::Exchange { times, .. } = &mut p.instructions[at].action {
            *times = 2;
        }
    });
    all.exchange(Base::Sequence, "another value", ("layout", "h2 is not there yet"), ("block.0", "h", F), |p, at| {
        if let Action::Exchange { border, .. } = &mut p.instructions[at].action {
            *border = 2;
        }
    });
    all.exchange(
        Base::Sequence,
        "before it is made",
        ("layout", "h is not there yet"),
        ("block.0", "h", F),
        |p, at| {
            move_to(p, at, at - 1);
        },
    );
    all.exchange(Base::Tensor, "gradient too early", ("layout", "is not there yet"), ("block.0", "h", B), |p, at| {
        move_to(p, at, at - 1);
    });
    all.exchange(
        Base::Sequence,
        "the statistics' gradient",
        ("layout", "by no collective here"),
        ("head", "s", F),
        |p, at| {
            repeat(p, at);
            if let Action::Exchange { phase, collective, .. } = &mut p.instructions[at + 1].action {
                (*phase, *collective) = (Phase::Backward, ReduceScatter);
            }
        },
    );
    all.exchange(Base::Sequence, "a border too far", ("no such", "border 9"), ("block.0", "h", F), |p, at| {
        if let Action::Exchange { border, .. } = &mut p.instructions[at].action {
            *border = 9;
        }
    });
    all.add(Base::Sequence, "nothing gathered when a forward runs again", ("layout", "attention needs h'"), |p| {
        let is_it = exchanges(p, "block.1", "h", F);
        let again = p.instructions.iter().rposition(|instruction| is_it(&instruction.action));
        drop(is_it);
        drop_at(p, again.unwrap());
    });
}

/// Layouts that are declared wrongly.
fn in_declarations(all: &mut Mutants) {
    use Layout::{Invariant, Partial, Replicated, Split};
    for base in [Base::Sequence, Base::Tensor] {
        let gathered = ("rule", "statistics makes s invariant, but takes h', which is replicated");
        all.declare(base, "gathered logits in a split loss", gathered, "head", &[("s", Invariant)]);
        let local = ("rule", "loss makes loss invariant, but takes h', which is replicated");
        all.declare(base, "a loss from each rank's own statistics", local, "head", &[("s'", Replicated)]);
        all.declare(
            base,
            "a loss of a part of the vocabulary",
            ("rule", "not invariant"),
            "head",
            &[("loss", Partial)],
        );
    }
    let forgotten = ("rule", "attention makes a partial, but takes h', which is invariant");
    all.declare(Base::Tensor, "no sum of the gradient at a column split", forgotten, "block.0", &[("h'", Invariant)]);
    let unsummed = ("rule", "mlp makes b invariant, but takes h2', which is replicated");
    all.declare(Base::Tensor, "a row split without a sum", unsummed, "block.1", &[("b", Invariant)]);
    let parts = ("rule", "attention makes a partial, but takes h', which is invariant");
    all.declare(Base::Sequence, "gathered, but used as if alike", parts, "block.0", &[("h'", Invariant)]);
    let mixed = ("rule", "positions makes x split, but takes e', which is invariant");
    all.declare(Base::Tensor, "a sequence that is split nowhere", mixed, "embedding", &[("x", Split)]);
    let between = ("rule", "the next unit takes invariant x");
    let stream = &[("e'", Split), ("x", Split)];
    all.declare(Base::Tensor, "one unit with sequence parallelism", between, "embedding", stream);
    let gathers = ("layout", "by all-gather here, not by all-reduce");
    all.declare(Base::Tensor, "looked up rows that are not summed", gathers, "embedding", &[("e", Split)]);
    let replicated = ("rule", "norm makes h replicated, but takes x, which is invariant");
    all.declare(Base::Tensor, "a norm of parts of one tensor", replicated, "block.0", &[("h", Replicated)]);
    let back = ("rule", "no collective turns a from replicated into invariant");
    all.declare(Base::Tensor, "a change that no collective makes", back, "block.0", &[("a", Replicated)]);
}

/// Faults of context parallelism: keys and values of wrong ranks, gradients that are not summed or
/// summed twice, losses that are normalised by a rank's own targets.
fn in_context(all: &mut Mutants) {
    use Collective::{AllGather, AllReduce, ReduceScatter, Ring};
    use Layout::{Invariant, Partial, Replicated, Split};
    let wrong = ("layout", "does not belong over");
    for base in [Base::Context, Base::Both] {
        for axis in [Axis::Tensor, Axis::Data, Axis::Shard, Axis::World] {
            let name = format!("keys and values of {} ranks", axis.name());
            all.exchange(base, &name, wrong, ("block.0", "kv", F), move |p, at| set_axis(p, at, axis));
            let name = format!("gradients of keys and values summed over {}", axis.name());
            all.exchange(base, &name, wrong, ("block.1", "kv", B), move |p, at| set_axis(p, at, axis));
        }
        for (collective, phase, reason) in [
            (AllReduce, F, "by all-gather here, not by all-reduce"),
            (ReduceScatter, F, "by all-gather here, not by reduce-scatter"),
            (Ring, F, "by all-gather here, not by"),
            (AllGather, B, "by reduce-scatter here, not by all-gather"),
            (AllReduce, B, "by reduce-scatter here, not by all-reduce"),
        ] {
            let at = ("block.0", "kv", phase);
            all.exchange(base, "another collective", ("layout", reason), at, move |p, at| {
                set_collective(p, at, collective)
            });
        }
        let own = ("layout", "attend needs kv', which is not there as replicated");
        all.exchange(base, "a rank's own keys and values only", own, ("block.0", "kv", F), drop_at);
        let lost = ("layout", "project needs the gradient of kv");
        all.exchange(base, "other ranks' gradients are lost", lost, ("block.1", "kv", B), drop_at);
        let again = ("layout", "has changed its layout already");
        all.exchange(base, "gathered twice", again, ("block.0", "kv", F), repeat);
        all.exchange(base, "summed twice", again, ("block.0", "kv", B), repeat);
        let early = ("unordered", "kv' of block.0");
        all.exchange(base, "keys that are not waited for", early, ("block.0", "kv", F), nothing_waits_for);
        let late = ("unordered", "the gradient of kv");
        all.exchange(base, "a gradient that is not waited for", late, ("block.0", "kv", B), nothing_waits_for);
        let local = ("layout", "all-gather does not belong over context");
        all.declare_context(base, "keys declared the rank's own", local, "block.0", &[("kv'", Split)]);
        let alike = ("rule", "attend makes");
        all.declare_context(base, "keys declared alike on all ranks", alike, "block.0", &[("kv'", Invariant)]);
        let whole = ("rule", "loss is invariant over context");
        all.declare_context(base, "a part's loss taken for the whole", whole, "head", &[("loss", Invariant)]);
        let part = ("rule", "loss is split over context");
        all.declare_context(base, "a loss that is no sum", part, "head", &[("loss", Split)]);
        let tokens = ("rule", "x is invariant over context");
        let stream = &[("x", Invariant)];
        all.declare_context(base, "an embedding of all tokens", tokens, "embedding", stream);
        let output = ("rule", "y is replicated over context");
        all.declare_context(base, "a block of all rows", output, "block.0", &[("y", Replicated)]);
        let between = ("rule", "the next unit takes");
        all.declare_context(base, "one unit with whole sequences", between, "block.1", &[("x", Partial)]);
        for axis in [Axis::Replicate, Axis::Shard, Axis::Context] {
            let name = format!("gradients summed over {} ranks only", axis.name());
            all.add(base, name, ("layout", "gradients are partial over data"), move |p| {
                let at = find(p, |action| matches!(action, Action::Reduce { .. })).unwrap();
                set_axis(p, at, axis);
            });
            let name = format!("losses normalised over the targets of {} ranks", axis.name());
            let count = |action: &Action| matches!(action, Action::Count { .. });
            let reason = ("layout", "their number is no sum over");
            all.edit(base, &name, reason, count, move |action| *action = Action::Count { axis });
        }
    }
    let rows = ("rule", "no ranks divide the sequence");
    all.declare_context(Base::Sequence, "rows of sequences that are whole", rows, "block.0", &[("x2", Split)]);
    let clip = |action: &Action| matches!(action, Action::Clip { .. });
    let same = ("layout", "hold the same gradients");
    for axis in [Axis::Context, Axis::Shard] {
        let name = format!("a norm that counts copies along {}", axis.name());
        all.edit(Base::Copies, &name, same, clip, move |action| *action = Action::Clip { axes: axes(&[axis]) });
    }
    let differ = ("layout", "along shard hold different");
    all.edit(Base::Context, "a norm of one part of the state", differ, clip, |action| {
        *action = Action::Clip { axes: axes(&[]) }
    });
    let partial = ("layout", "is not partial over context");
    all.edit(
        Base::Both,
        "replicated norms summed over parts of the sequence",
        partial,
        |action| matches!(action, Action::Tie { .. }),
        |action| {
            if let Action::Tie { axis, .. } = action {
                *axis = Axis::Context;
            }
        },
    );
}

/// Sums of gradients over ranks, and the norm.
fn in_gradients(all: &mut Mutants) {
    let tie = |action: &Action| matches!(action, Action::Tie { axis: Axis::Tensor, .. });
    let reduce = |action: &Action| matches!(action, Action::Reduce { .. });
    let stages = |action: &Action| matches!(action, Action::Tie { axis: Axis::Pipeline, .. });
    let each = |p: &mut Program, is_it: &dyn Fn(&Action) -> bool, change: &dyn Fn(&mut Program, usize)| {
        if let Some(at) = find(p, is_it) {
            change(p, at);
        }
    };
    all.add(Base::Sequence, "replicated norms are not summed", ("order", "is partial over tensor"), move |p| {
        each(p, &tie, &drop_at)
    });
    all.add(Base::Sequence, "replicated norms are summed twice", ("order", "summed over tensor again"), move |p| {
        each(p, &tie, &repeat)
    });
    for axis in [Axis::Data, Axis::World, Axis::Pipeline] {
        let name = format!("replicated norms are summed over {}", axis.name());
        all.add(Base::Sequence, name, ("layout", "is not partial over"), move |p| {
            each(p, &tie, &|p, at| set_axis(p, at, axis));
        });
    }
    all.add(
        Base::Sequence,
        "replicated norms are summed before the data ranks",
        ("order", "is the sum of 0 of 2"),
        move |p| {
            each(p, &tie, &|p, at| swap_actions(p, at, at - 1));
        },
    );
    all.add(
        Base::Tensor,
        "norms that every rank computes are summed",
        ("layout", "is not partial over tensor"),
        move |p| {
            each(p, &reduce, &|p, at| {
                repeat(p, at);
                let unit = p.instructions[at].action.unit().unwrap();
                p.instructions[at + 1].action = Action::Tie { unit, axis: Axis::Tensor };
            });
        },
    );
    all.add(Base::Stages, "a tied table is not summed", ("order", "is partial over pipeline"), move |p| {
        each(p, &stages, &drop_at)
    });
    all.add(Base::Stages, "a tied table is summed twice", ("order", "summed over pipeline again"), move |p| {
        each(p, &stages, &repeat)
    });
    all.add(
        Base::Stages,
        "a tied table is summed over tensor",
        ("layout", "unit 0 is not partial over tensor"),
        move |p| {
            each(p, &stages, &|p, at| set_axis(p, at, Axis::Tensor));
        },
    );
    for axis in [Axis::Tensor, Axis::World, Axis::Shard, Axis::Replicate] {
        let name = format!("gradients are summed over {}", axis.name());
        all.add(Base::Sequence, name, ("layout", "gradients are partial over data"), move |p| {
            each(p, &reduce, &|p, at| set_axis(p, at, axis));
        });
    }
    all.add(Base::Sequence, "gradients are summed twice", ("order", "no gradient that is not reduced"), move |p| {
        each(p, &reduce, &repeat)
    });
    all.add(Base::Tensor, "gradients are not summed", ("order", "is the sum of 0 of 2"), move |p| {
        each(p, &reduce, &drop_at)
    });
    all.add(Base::Sequence, "a tie after the norm", ("unordered", "the gradient of head"), move |p| {
        let clip = find(p, |action| matches!(action, Action::Clip { .. })).unwrap();
        each(p, &tie, &|p, at| move_to(p, at, clip));
    });
    let norms: [(Base, &str, &[Axis], &str); 6] = [
        (Base::Sequence, "each rank's own norm", &[], "they would not count"),
        (Base::Sequence, "a norm of one part of the weights", &[Axis::Shard], "along tensor hold different"),
        (Base::Sequence, "a norm of one shard", &[Axis::Tensor], "along shard hold different"),
        (
            Base::Tensor,
            "a norm that counts replicas",
            &[Axis::Shard, Axis::Replicate, Axis::Tensor],
            "along replicate hold the same",
        ),
        (Base::Stages, "each stage's own norm", &[Axis::Shard, Axis::Tensor], "along pipeline hold different"),
        (Base::Stages, "a norm over all", &[Axis::World], "they would not count"),
    ];
    for (base, name, list, reason) in norms {
        let is_clip = |action: &Action| matches!(action, Action::Clip { .. });
        all.edit(base, name, ("layout", reason), is_clip, move |action| *action = Action::Clip { axes: axes(list) });
    }
}

/// Takes an instruction out of the dependencies of all others.
fn nothing_waits_for(p: &mut Program, at: usize) {
    for instruction in &mut p.instructions {
        instruction.after.retain(|on| *on as usize != at);
    }
}

/// The loss's normalisation, order, dependencies, and ranks that differ.
fn in_order(all: &mut Mutants) {
    let count = |action: &Action| matches!(action, Action::Count { .. });
    all.add(Base::Tensor, "each rank's own number of targets", ("order", "the targets are not counted"), move |p| {
        let at = find(p, count).unwrap();
        drop_at(p, at);
    });
    for axis in [Axis::Tensor, Axis::World, Axis::Shard, Axis::Pipeline] {
        let edit = move |action: &mut Action| *action = Action::Count { axis };
        let name = format!("targets counted over {}", axis.name());
        all.edit(Base::Stages, &name, ("layout", "their number is no sum over"), count, edit);
    }
    all.add(Base::Sequence, "targets counted after a forward", ("unordered", "the number of targets"), move |p| {
        let at = find(p, count).unwrap();
        move_to(p, at, at + 1);
    });
    all.exchange(
        Base::Sequence,
        "a segment that does not wait",
        ("unordered", "h' of block.0"),
        ("block.0", "h", F),
        nothing_waits_for,
    );
    all.exchange(
        Base::Tensor,
        "a backward that does not wait",
        ("unordered", "the gradient of h"),
        ("block.0", "h", B),
        nothing_waits_for,
    );
    all.exchange(
        Base::Sequence,
        "an exchange that does not wait",
        ("unordered", "a of block.0"),
        ("block.0", "a", F),
        |p, at| {
            p.instructions[at].after.clear();
        },
    );
    let sends =
        |to: Phase| move |action: &Action| matches!(action, Action::Send { micro_batch: 0, phase, .. } if *phase == to);
    all.add(
        Base::Stages,
        "sent before the exchange",
        ("layout", "is not there in the layout that is sent"),
        move |p| {
            if let (Some(at), Some(exchange)) = (find(p, sends(F)), find(p, exchanges(p, "block.0", "b", F))) {
                move_to(p, at, exchange);
            }
        },
    );
    all.add(
        Base::Stages,
        "a gradient sent too early",
        ("layout", "is not there in the layout that is sent"),
        move |p| {
            if let (Some(at), Some(exchange)) = (find(p, sends(B)), find(p, exchanges(p, "block.1", "h", B))) {
                move_to(p, at, exchange);
            }
        },
    );
    all.add(Base::Stages, "a send that does not wait", ("unordered", "the output of block.0"), move |p| {
        if let Some(at) = find(p, sends(F)) {
            p.instructions[at].after.clear();
        }
    });
    let again = |action: &Action| matches!(action, Action::Forward { unit: 2, segment: 4, keep: Keep::Everything, .. });
    all.add(Base::Sequence, "a forward that does not run again to its end", ("order", "has not run again"), move |p| {
        let at = find(p, again).unwrap();
        drop_at(p, at);
    });
    let weights = |action: &Action| matches!(action, Action::Backward { unit: 1, part: BackwardPart::Weights, .. });
    all.add(Base::Halves, "weights that are not differentiated", ("order", "segments out of order"), move |p| {
        if let Some(at) = find(p, weights) {
            drop_at(p, at);
        }
    });
    all.add(Base::Sequence, "weights before their input", ("order", "comes before its weights"), move |p| {
        let at = find(p, weights).unwrap();
        let input = p.instructions[..at].iter().rposition(|i| matches!(i.action, Action::Backward { .. })).unwrap();
        move_to(p, at, input);
    });
    let mlp = |action: &Action| matches!(action, Action::Forward { unit: 1, segment: 3, micro_batch: 0, .. });
    all.add(Base::Tensor, "segments in another order", ("layout", "b is not there yet"), move |p| {
        let at = find(p, mlp).unwrap();
        move_to(p, at, at + 2);
    });
    all.exchange(
        Base::Sequence,
        "a rank with another message",
        ("disagree", "inner lane"),
        ("block.0", "h", F),
        |p, at| {
            p.instructions[at].bytes /= 2;
        },
    );
    all.0.last_mut().unwrap().rank = Some(1);
    all.add(Base::Sequence, "a rank that sums more", ("disagree", "reduce lane"), |p| {
        let at = find(p, |action| matches!(action, Action::Tie { .. })).unwrap();
        p.instructions[at].bytes *= 2;
    });
    all.0.last_mut().unwrap().rank = Some(0);
}

#[test]
fn mutants_of_layouts_are_refused_for_their_reason() {
    let mut all = Mutants::default();
    at_borders(&mut all);
    in_declarations(&mut all);
    in_context(&mut all);
    in_gradients(&mut all);
    in_order(&mut all);
    let mut wrong = Vec::new();
    for mutant in &all.0 {
        let correct = programs(mutant.base);
        assert_eq!(check_ranks(&correct), Ok(()), "{:?}", mutant.base);
        let mut mutated = correct.clone();
        for (rank, program) in mutated.iter_mut().enumerate() {
            if mutant.rank.is_none_or(|only| only == rank) {
                (mutant.change)(program);
            }
        }
        assert_ne!(mutated, correct, "{} changes nothing", mutant.name);
        match check_ranks(&mutated) {
            Ok(()) => wrong.push(format!("{}: accepted", mutant.name)),
            Err(error) => {
                let (kind, words) = kind(&error);
                if kind != mutant.kind || !words.contains(mutant.reason) {
                    wrong.push(format!("{}: {kind}: {words}", mutant.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), all.0.len(), wrong.join("\n"));
    assert!(all.0.len() >= 160, "{} mutants", all.0.len());
}

/// Each instruction of a split program is needed, and once only; so is each dependency.
#[test]
fn no_instruction_and_no_dependency_of_split_units_is_superfluous() {
    for base in [Base::Sequence, Base::Tensor, Base::Stages, Base::Halves, Base::Context, Base::Copies, Base::Both] {
        let correct = programs(base);
        let refused = |change: &dyn Fn(&mut Program), what: &str| {
            let mut mutated = correct.clone();
            mutated.iter_mut().for_each(change);
            assert!(check_ranks(&mutated).is_err(), "{base:?} without {what}:\n{}", correct[0]);
        };
        for number in 0..correct.iter().map(|program| program.instructions.len()).min().unwrap() {
            refused(&|program| drop_at(program, number), &format!("{number}"));
            refused(&|program| repeat(program, number), &format!("one {number} only"));
            let after = correct.iter().map(|program| program.instructions[number].after.len()).min().unwrap();
            for place in 0..after {
                let forget = |program: &mut Program| {
                    program.instructions[number].after.remove(place);
                };
                refused(&forget, &format!("dependency {place} of {number}"));
            }
        }
    }
}
