"""Training of draft heads.

checkpoints/   checkpoints: what is kept, when it is written, how a run resumes
distributed/   processes: launched, watched, sharing one head
planning/      what a run will cost, and what is wrong with it, before anything is loaded
release/       a trained head to the Hub: folder, card, verification, and the doctor
tracking/      where a run's numbers go: metrics.jsonl, wandb, TensorBoard, the progress bar, the table of a sweep
config.py      the types of conf/train.yaml
losses.py      the losses: pure functions of the target's law and the draft's
weights.py     which rows are trained, how much each counts, and what is drawn for them
objective.py   the loss and its gradient, a chunk of rows at a time
optim.py       AdamW and Muon, their schedule, the average of the weights
loop.py        the loop: steps, measurements, the best head
step.py        one optimiser step
acceptance.py  what the head is worth so far: τ by the verifier, estimates between
guard.py       bad steps: found, kept, skipped
features.py    where a run's features come from, and what of the target it loads
start.py       what a head starts from: nothing, another head, a part of the target
adapt.py       a head adapted by low-rank factors, and made plain again
streams.py     the command that trains speculative streams, and its loop
publish.py     the command: a trained head to the Hub, and back to verify it
convert.py     the command that writes a pickle as safetensors, once
run.py         the command, and where every part is constructed
"""
