"""Training of draft heads.

distributed/   the processes of a run: launching, watching, sharding strategies
package/       the package headstart: its names in Python, its command, its build
release/       publishing a trained head: folder, card, upload, verification
config.py      the types of conf/train.yaml
resolve.py     a configuration resolved to a run: checks, device, processes, placement; the plan as tables
checkpoint.py  checkpoints: their content and format, asynchronous saving, resuming
plan.py        the plan of a run in closed form: memory, disk, operations, hours
losses.py      the losses: pure functions of the target's distribution p and the draft's q
objective.py   the loss and its gradient, a chunk of rows at a time; row weights; anchors and feature noise
rollouts.py    on-policy training: the head's drafts on training prompts, as micro-batches
optim.py       AdamW and Muon, their schedule, the EMA of the weights
loop.py        the training loop: steps, measurements of acceptance by the verifier, the best head
step.py        one optimiser step and its FLOPs; bad steps are skipped and their batches saved
start.py       the initial weights of a head: random, another head's, the target's last layer; LoRA adapters
streams.py     the command that trains speculative streams, and its loop
publish.py     the command that publishes a trained head and verifies the download
sweep.py       the runs of a multirun: their table, and the τ to optimise
trackers.py    a run's numbers: metrics.jsonl, wandb, TensorBoard and the progress bar
convert.py     the command that converts a pickle to safetensors
build.py       a run's parts: target, head, data, feature source, training loop
run.py         the command that trains: resolve, plan or launch, build, train, evaluate
"""
