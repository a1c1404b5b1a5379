//! The work of encoding: bytes of memory that a rank reads and writes for the encoded messages of
//! an instruction. Both price books turn them into seconds at the speed of a copy.

use trainyard_program::{Action, Axis, BlockCodec, Codec, Encoding, Factors, Instruction, Program};

/// Bytes read and written to encode and decode the messages of `instruction`; 0 if they travel as
/// they are.
pub fn encoding_bytes(program: &Program, instruction: &Instruction) -> f64 {
    let Some(encoding) = instruction.encoding else { return decoding_bytes(instruction) };
    let mesh = &program.mesh;
    let (shards, replicas) = (f64::from(mesh.shard_degree()), f64::from(mesh.dp_replicate));
    if let (Action::Gather { .. }, Codec::Blocks(codec)) = (instruction.action, encoding.codec) {
        // The rank's shard is widened to f32 and encoded, and all shards are decoded and narrowed.
        let width = f64::from(instruction.element_bytes);
        let elements = instruction.bytes as f64 / width;
        let each = width + 8.0 + codec.bytes(1 << 20) as f64 / f64::from(1 << 20);
        return elements * each * (1.0 + 1.0 / shards);
    }
    if let (Action::Send { .. } | Action::Recv { .. }, Codec::Blocks(_)) = (instruction.action, encoding.codec) {
        // Elements are widened to f32 and encoded, or decoded and narrowed.
        let width = f64::from(instruction.element_bytes);
        return instruction.bytes as f64 / width * (width + 8.0)
            + instruction.sent_bytes(Axis::Pipeline, instruction.bytes) as f64;
    }
    let reduces = matches!(instruction.action, Action::Reduce { .. });
    // A reduction's buffer is the whole unit, an outer step's is the part that replicas share.
    let (in_group, elements) = match reduces {
        true => (encoding.is_over(Axis::Shard) && shards > 1.0, instruction.bytes as f64 / 4.0 / shards),
        false => (false, instruction.bytes as f64 / 4.0),
    };
    let across = replicas > 1.0 && !(reduces && program.kind.gradient_axis() == Axis::Shard);
    let codec = match encoding.codec {
        Codec::Blocks(codec) => codec,
        // The residual is added, two products and the residual read the matrix, the residual is
        // written, and the sum of the rank's own part is written.
        Codec::PowerSgd(_) => {
            let Factors { matrices, plain, .. } = instruction.factors.unwrap_or_default();
            let feedback = if encoding.feedback { 24.0 } else { 0.0 };
            return matrices as f64 * (8.0 + feedback + 4.0 / shards) + 8.0 * plain as f64;
        }
    };
    let wire = codec.bytes(1 << 20) as f64 / f64::from(1 << 20);
    // The residual is read and written. Choosing the largest elements takes several passes.
    let passes = if matches!(codec, BlockCodec::TopK { .. }) { 5.0 } else { 1.0 };
    let encode = passes * (4.0 + if encoding.feedback { 8.0 } else { 0.0 }) + wire;
    let decode = |messages: f64| messages * wire + 4.0;
    // Velocities are read and written where a rank encodes its own gradient.
    let velocity = |own: bool| if encoding.momentum && own { 8.0 } else { 0.0 };
    let group = shards * elements * (encode + velocity(true)) + elements * decode(shards);
    let group = if in_group { group } else { 0.0 };
    // Each rank encodes its part for all replicas, adds up a share of it, encodes the sum of the
    // share, and decodes the sums of all.
    let share = elements / replicas;
    let contribution = elements * (encode + velocity(!in_group));
    let replicated = contribution + share * (decode(replicas) + encode) + elements * decode(1.0);
    group + if across { replicated } else { 0.0 }
}

/// Bytes read and written to decode a gathered unit whose frozen matrices lie encoded: its codes
/// are fewer bytes than the memory that the gather takes. 0 for every other instruction.
fn decoding_bytes(instruction: &Instruction) -> f64 {
    let Action::Gather { .. } = instruction.action else { return 0.0 };
    let taken: i64 = instruction.effects.iter().map(|effect| effect.bytes.max(0)).sum();
    if (instruction.bytes as i64) < taken { instruction.bytes as f64 + taken as f64 } else { 0.0 }
}

/// FLOPs of the products with which a rank makes and decodes low-rank factors; 0 for other codecs.
pub fn encoding_flops(program: &Program, instruction: &Instruction) -> f64 {
    let Some(Encoding { codec: Codec::PowerSgd(codec), feedback, .. }) = instruction.encoding else { return 0.0 };
    let matrices = instruction.factors.unwrap_or_default().matrices as f64;
    let products = 2.0 + f64::from(u8::from(feedback)) + 1.0 / f64::from(program.mesh.shard_degree());
    2.0 * f64::from(codec.rank) * matrices * products
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, Strategy, Tier, UnitShape, lower_rank};

    #[test]
    fn stages_encode_what_they_send_and_decode_what_they_get() {
        let unit = |name: &str| UnitShape { name: name.into(), output_bytes: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let mesh = Mesh { pp: 2, ..Mesh::data(1, 1) };
        let strategy = Strategy { activations: [Some(BlockCodec::Int4), None], ..Strategy::new(2) };
        let first = lower_rank(&model, &mesh, &strategy, 0).unwrap();
        let of = |is: fn(&Action) -> bool| first.instructions.iter().find(|at| is(&at.action)).unwrap();
        let sends = of(|action| matches!(action, Action::Send { .. }));
        // 2^19 elements of 2 bytes are read, written and read as f32, and written in 4 bits.
        let sent = f64::from((1 << 19) / 256 * 130);
        assert_eq!(encoding_bytes(&first, sends), f64::from(1 << 19) * 10.0 + sent);
        assert_eq!(sends.sent_bytes(Axis::Pipeline, sends.bytes) as f64, sent);
        let gets = of(|action| matches!(action, Action::Recv { .. }));
        assert_eq!((encoding_bytes(&first, gets), gets.sent_bytes(Axis::Pipeline, gets.bytes)), (0.0, 1 << 20));
    }

    #[test]
    fn feedback_and_more_ranks_cost_more_and_no_codec_costs_nothing() {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let work = |mesh: Mesh, gradients: Option<Encoding>| -> f64 {
            let program = lower_rank(&model, &mesh, &Strategy { gradients, ..Strategy::new(2) }, 0).unwrap();
            program.instructions.iter().map(|instruction| encoding_bytes(&program, instruction)).sum()
        };
        let int8 = |feedback| Some(Encoding::new(Codec::Blocks(BlockCodec::Int8), Axis::Data, feedback));
        assert_eq!(work(Mesh::data(4, 1), None), 0.0);
        assert_eq!(work(Mesh::data(1, 1), int8(true)), 0.0);
        let plain = work(Mesh::data(2, 1), int8(false));
        assert!(plain > 0.0 && work(Mesh::data(2, 1), int8(true)) > plain);
        assert!(work(Mesh::data(2, 2), int8(false)) > work(Mesh::data(1, 2), int8(false)));
        let gathers = Some(Encoding::new(Codec::Blocks(BlockCodec::Int8), Axis::Shard, false));
        let strategy = Strategy { gathers, zero_stage: 3, ..Strategy::new(2) };
        let program = lower_rank(&model, &Mesh::data(1, 2), &strategy, 0).unwrap();
        let gather = program.instructions.iter().find(|at| matches!(at.action, Action::Gather { .. })).unwrap();
        // 2^20 elements of 2 bytes: half of them are encoded, all are decoded.
        assert_eq!(encoding_bytes(&program, gather), 1.5 * f64::from(1 << 20) * (2.0 + 8.0 + 258.0 / 256.0));
        assert_eq!(gather.sent_bytes(Axis::Shard, gather.bytes), (1 << 20) / 256 * 258);
        // Shards that lie in 8 bits: the codes are read, and the decoded elements written.
        let (mut frozen, mut strategy) = (model.clone(), Strategy { gathers: None, ..strategy });
        (frozen.units[1].frozen_elements, frozen.units[1].encodable) = (1 << 20, vec![1 << 20]);
        let plain = lower_rank(&frozen, &Mesh::data(1, 2), &strategy, 0).unwrap();
        strategy.offload.parameters = Some(Tier::Encoded(BlockCodec::Int8));
        let encoded = lower_rank(&frozen, &Mesh::data(1, 2), &strategy, 0).unwrap();
        let work = |program: &Program| -> Vec<f64> {
            let of_gathers = program.instructions.iter().filter(|at| matches!(at.action, Action::Gather { .. }));
            let mut work: Vec<f64> = of_gathers.map(|gather| encoding_bytes(program, gather)).collect();
            work.dedup();
            work
        };
        // The embedding is gathered as it is, before and after the other unit.
        let decoding = f64::from((1 << 20) / 256 * 258) + 2.0 * f64::from(1 << 20);
        assert_eq!((work(&plain), work(&encoded)), (vec![0.0], vec![0.0, decoding, 0.0]));
    }
}
