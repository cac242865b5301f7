# ruff: noqa: C408  (as MMEngine's own configs are written)
"""Settings of mmengine_runner.py, as MMEngine reads them. What shards the model is two of them: `custom_imports` and
`model_wrapper_cfg`."""

custom_imports = dict(imports=["shardwise.mmengine", "mmengine_parts"])
default_scope = "mmengine"

model = dict(
    type="SpiralClassifier",
    width=32,
    depth=2,
    arms=3,
    init_cfg=dict(type="Kaiming", layer="Linear", nonlinearity="relu"),
)
model_wrapper_cfg = dict(
    type="MMFullyShardedDataParallel",
    # Each block is gathered by itself, and what is left with the model.
    auto_wrap_policy=dict(type="module_wrap_policy", module_classes=["Block"]),
)

loader = dict(batch_size=32, num_workers=0, collate_fn=dict(type="default_collate"))
train_dataloader = dict(
    dataset=dict(type="Spirals", size=1024, arms=3, seed=0),
    sampler=dict(type="DefaultSampler", shuffle=True),
    **loader,
)
val_dataloader = dict(
    dataset=dict(type="Spirals", size=512, arms=3, seed=1),
    sampler=dict(type="DefaultSampler", shuffle=False),
    **loader,
)
val_evaluator = dict(type="Accuracy")
test_dataloader = val_dataloader
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=2)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-2),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = dict(type="CosineAnnealingLR", T_max=10)
default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=2, max_keep_ckpts=1))
custom_hooks = [dict(type="EMAHook", momentum=0.02)]
randomness = dict(seed=0)
launcher = "pytorch"
log_level = "ERROR"
