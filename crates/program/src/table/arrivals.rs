//! The order in which every stage receives the inputs that come from others.
//!
//! A stage sends its results one after the other, in the order of its turns, and receives one after
//! the other. Messages from one stage to another are received in the order of their sends. No stage
//! may wait for another for ever, even if a send waits until it is received.

use super::{ScheduleTable, TurnTimes, Walk};
use crate::BackwardPart;

/// A result that another stage takes.
#[derive(Clone, Copy)]
struct Message {
    from: usize,
    to: usize,
    /// Places of the turns that make it and take it, in an order in which all turns can run.
    made: usize,
    taken: usize,
    /// Indices of these turns among those of their stages.
    maker: usize,
    taker: usize,
}

impl ScheduleTable {
    /// Per stage, the turns whose input comes from another stage, in the order in which it comes.
    ///
    /// Normally a stage receives messages in the order in which its turns need them. If stages
    /// would then wait for each other in a circle, one order of all messages is used instead: each
    /// message comes just before the turn that needs it, or before a later message of the same
    /// sender. Sends and receives of all stages follow this order, in which a message depends only
    /// on earlier ones. So there is no deadlock.
    pub(crate) fn arrivals(&self) -> Vec<Vec<u32>> {
        let messages = self.messages();
        let as_taken = in_order(&messages, |message| message.from * self.turns.len() + message.to);
        let order = match self.comes_to_an_end(&messages, &as_taken) {
            true => as_taken,
            false => in_order(&messages, |message| message.from),
        };
        let mut arrivals = vec![Vec::new(); self.turns.len()];
        for message in order {
            arrivals[messages[message].to].push(messages[message].taker as u32);
        }
        arrivals
    }

    /// All messages, by the time at which they are made.
    fn messages(&self) -> Vec<Message> {
        let walk = Walk::of(self, TurnTimes::EQUAL);
        let mut made = vec![(0, 0); 2 * self.stage_of.len() * self.micro_batches as usize];
        let mut messages = Vec::new();
        for (taken, (stage, number)) in walk.order.iter().enumerate() {
            let (to, taker) = (*stage as usize, *number as usize);
            let turn = &self.turns[to][taker];
            if turn.part != BackwardPart::Weights {
                made[self.place(turn)] = (taken, taker);
            }
            if let Some((needs, from)) = self.needs(turn).filter(|(_, from)| from != stage) {
                let (made, maker) = made[self.place(&needs)];
                messages.push(Message { from: from as usize, to, made, taken, maker, taker });
            }
        }
        messages.sort_unstable_by_key(|message| message.made);
        messages
    }

    /// True if all stages finish with receives in the order `order`. It is assumed that a send
    /// waits until it is received, and that a receive begins at most two turns before the turn that
    /// needs it or a later message.
    fn comes_to_an_end(&self, messages: &[Message], order: &[usize]) -> bool {
        let stages = self.turns.len();
        let mut sends: Vec<Vec<usize>> = vec![Vec::new(); stages];
        messages.iter().enumerate().for_each(|(number, message)| sends[message.from].push(number));
        // Per stage, each receive with the first turn that takes it or a later one.
        let mut receives: Vec<Vec<(usize, usize)>> = vec![Vec::new(); stages];
        for number in order.iter().rev() {
            let receives = &mut receives[messages[*number].to];
            let later = receives.last().map_or(usize::MAX, |(_, first)| *first);
            receives.push((*number, later.min(messages[*number].taker)));
        }
        // The next receive is the last in the list.
        let mut needs: Vec<Vec<Option<usize>>> = self.turns.iter().map(|turns| vec![None; turns.len()]).collect();
        messages.iter().enumerate().for_each(|(number, message)| needs[message.to][message.taker] = Some(number));
        let mut received = vec![false; messages.len()];
        let (mut ran, mut sent) = (vec![0; stages], vec![0; stages]);
        let mut awake: Vec<usize> = (0..stages).collect();
        while let Some(stage) = awake.pop() {
            let before = ran[stage];
            // Turns of one stage that need each other are in order on it.
            while needs[stage].get(ran[stage]).is_some_and(|needs| needs.is_none_or(|message| received[message])) {
                ran[stage] += 1;
            }
            if ran[stage] > before {
                awake.extend(receives[stage].last().map(|(next, _)| messages[*next].from));
            }
            let Some(&number) = sends[stage].get(sent[stage]) else { continue };
            let Message { to, maker, .. } = messages[number];
            let stands = |(next, first): &(usize, usize)| *next == number && ran[to] + 1 >= *first;
            if maker < ran[stage] && receives[to].last().is_some_and(stands) {
                receives[to].pop();
                received[number] = true;
                sent[stage] += 1;
                awake.extend([to, stage]);
                awake.extend(receives[to].last().map(|(next, _)| messages[*next].from));
            }
        }
        received.iter().all(|received| *received)
    }
}

/// The messages in the order in which they are taken, but each before later ones of its group that
/// are taken earlier.
fn in_order(messages: &[Message], group: impl Fn(&Message) -> usize) -> Vec<usize> {
    let mut first = vec![usize::MAX; messages.iter().map(|message| group(message) + 1).max().unwrap_or(0)];
    let mut keys = vec![0; messages.len()];
    for (number, message) in messages.iter().enumerate().rev() {
        let first = &mut first[group(message)];
        *first = message.taken.min(*first);
        keys[number] = *first;
    }
    let mut order: Vec<usize> = (0..messages.len()).collect();
    order.sort_by_key(|number| (keys[*number], *number));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PipelineSchedule;

    /// Known schedules receive in the order of use, but where the two directions of a V cross.
    #[test]
    fn messages_come_as_they_are_taken() {
        for schedule in PipelineSchedule::ALL {
            for pp in 2..=8 {
                let table = schedule.table(pp, 4 * pp);
                let (messages, arrivals) = (table.messages(), table.arrivals());
                let as_taken = in_order(&messages, |message| message.from * table.turns.len() + message.to);
                assert!(table.comes_to_an_end(&messages, &as_taken), "{schedule} {pp}");
                let v = schedule.facts().map == crate::StretchMap::V;
                assert!(v || arrivals.iter().all(|arrivals| arrivals.is_sorted()), "{schedule} {pp}");
            }
        }
    }

    /// Stages whose messages cross would wait for each other for ever in the order of use.
    #[test]
    fn a_table_whose_messages_cross_has_another_order() {
        let text = "0F0,0F1,0I1,0I0,0W1,0W0\n1F1,1F0,5F1,6F1,6I1,5B1,6W1,1B1,5F0,6F0,6B0,5I0,1B0,5W0\n\
                    2F1,2F0,2I1,2W1,2I0,2W0\n3F1,4F1,3F0,4I1,4W1,4F0,3B1,4I0,4W0,3I0,3W0";
        let table = ScheduleTable::parse(text).unwrap();
        let messages = table.messages();
        let as_taken = in_order(&messages, |message| message.from * table.turns.len() + message.to);
        assert!(!table.comes_to_an_end(&messages, &as_taken));
        assert!(table.comes_to_an_end(&messages, &in_order(&messages, |message| message.from)));
    }
}
