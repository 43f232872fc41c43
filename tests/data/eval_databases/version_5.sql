BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    pid INTEGER,
    started INTEGER,
    boot TEXT,
    gpus TEXT,
    directory TEXT,
    PRIMARY KEY (job_id, number)
);
INSERT INTO "attempts" VALUES('a0a8f751ca5c57ba',1,1.79579652719078755379e+09,1.79579652906513404842e+09,'completed',9511,7047675,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/a0a8f751ca5c57ba/1');
INSERT INTO "attempts" VALUES('26811812f295464f',1,1.79579652925413274762e+09,1.79579653166100192064e+09,'completed',9546,7047913,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/26811812f295464f/1');
INSERT INTO "attempts" VALUES('19b764cc376c8a0d',1,1.7957965318250486851e+09,1.79579653386528325081e+09,'completed',9578,7048134,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/19b764cc376c8a0d/1');
INSERT INTO "attempts" VALUES('bc558784354eb51d',1,1.79579653404591226581e+09,1.79579653594258165354e+09,'completed',9607,7048343,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/bc558784354eb51d/1');
INSERT INTO "attempts" VALUES('76067061a9259582',1,1.79579653606153798106e+09,1.79579653938193511963e+09,'completed',9644,7048536,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/76067061a9259582/1');
INSERT INTO "attempts" VALUES('8920cb6a8c50d9e3',1,1.79579653957782626148e+09,1.79579654386106491088e+09,'completed',9665,7048936,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/8920cb6a8c50d9e3/1');
INSERT INTO "attempts" VALUES('16066ea4b27b828a',1,1.79579654399750542645e+09,1.79579654979994535451e+09,'completed',9733,7049700,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/16066ea4b27b828a/1');
INSERT INTO "attempts" VALUES('28f1ed798e15133f',1,1.79579654999251866337e+09,1.79579655267668771741e+09,'completed',9826,7050011,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/28f1ed798e15133f/1');
INSERT INTO "attempts" VALUES('d106c9cafd0f1000',1,1.79579655284131550784e+09,1.79579655615579104419e+09,'completed',9872,7050329,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/d106c9cafd0f1000/1');
INSERT INTO "attempts" VALUES('4f1625969b2f1603',1,1.79579655639663815502e+09,NULL,NULL,9929,7050661,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/4f1625969b2f1603/1');
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    at REAL NOT NULL
);
INSERT INTO "events" VALUES(1,'a0a8f751ca5c57ba','queued',NULL,1.79579652718102741239e+09);
INSERT INTO "events" VALUES(2,'a0a8f751ca5c57ba','running','merging',1.79579652719078755379e+09);
INSERT INTO "events" VALUES(3,'a0a8f751ca5c57ba','running','evaluating',1.79579652857943558694e+09);
INSERT INTO "events" VALUES(4,'a0a8f751ca5c57ba','completed',NULL,1.79579652906513404842e+09);
INSERT INTO "events" VALUES(5,'26811812f295464f','queued',NULL,1.79579652922071790694e+09);
INSERT INTO "events" VALUES(6,'26811812f295464f','running','merging',1.79579652925413274762e+09);
INSERT INTO "events" VALUES(7,'26811812f295464f','running','evaluating',1.79579653094982910153e+09);
INSERT INTO "events" VALUES(8,'26811812f295464f','completed',NULL,1.79579653166100192064e+09);
INSERT INTO "events" VALUES(9,'19b764cc376c8a0d','queued',NULL,1.79579653180894875524e+09);
INSERT INTO "events" VALUES(10,'19b764cc376c8a0d','running','merging',1.7957965318250486851e+09);
INSERT INTO "events" VALUES(11,'19b764cc376c8a0d','running','evaluating',1.79579653317238354683e+09);
INSERT INTO "events" VALUES(12,'19b764cc376c8a0d','completed',NULL,1.79579653386528325081e+09);
INSERT INTO "events" VALUES(13,'bc558784354eb51d','queued',NULL,1.79579653404235863685e+09);
INSERT INTO "events" VALUES(14,'bc558784354eb51d','running','merging',1.79579653404591226581e+09);
INSERT INTO "events" VALUES(15,'bc558784354eb51d','running','evaluating',1.79579653525739550592e+09);
INSERT INTO "events" VALUES(16,'bc558784354eb51d','completed',NULL,1.79579653594258165354e+09);
INSERT INTO "events" VALUES(17,'76067061a9259582','queued',NULL,1.79579653605336236952e+09);
INSERT INTO "events" VALUES(18,'76067061a9259582','running','merging',1.79579653606153798106e+09);
INSERT INTO "events" VALUES(19,'76067061a9259582','running','evaluating',1.79579653743113517756e+09);
INSERT INTO "events" VALUES(20,'76067061a9259582','completed',NULL,1.79579653938193511963e+09);
INSERT INTO "events" VALUES(21,'8920cb6a8c50d9e3','queued',NULL,1.7957965395411472321e+09);
INSERT INTO "events" VALUES(22,'8920cb6a8c50d9e3','running','merging',1.79579653957782626148e+09);
INSERT INTO "events" VALUES(23,'8920cb6a8c50d9e3','running','evaluating',1.79579654118303585052e+09);
INSERT INTO "events" VALUES(24,'8920cb6a8c50d9e3','completed',NULL,1.79579654386106491088e+09);
INSERT INTO "events" VALUES(25,'16066ea4b27b828a','queued',NULL,1.79579654399433755879e+09);
INSERT INTO "events" VALUES(26,'16066ea4b27b828a','running','merging',1.79579654399750542645e+09);
INSERT INTO "events" VALUES(27,'16066ea4b27b828a','running','evaluating',1.79579654883886051172e+09);
INSERT INTO "events" VALUES(28,'16066ea4b27b828a','completed',NULL,1.79579654979994535451e+09);
INSERT INTO "events" VALUES(29,'28f1ed798e15133f','queued',NULL,1.79579654998128175735e+09);
INSERT INTO "events" VALUES(30,'28f1ed798e15133f','running','merging',1.79579654999251866337e+09);
INSERT INTO "events" VALUES(31,'28f1ed798e15133f','running','evaluating',1.79579655194496202465e+09);
INSERT INTO "events" VALUES(32,'28f1ed798e15133f','completed',NULL,1.79579655267668771741e+09);
INSERT INTO "events" VALUES(33,'d106c9cafd0f1000','queued',NULL,1.79579655282684111598e+09);
INSERT INTO "events" VALUES(34,'d106c9cafd0f1000','running','merging',1.79579655284131550784e+09);
INSERT INTO "events" VALUES(35,'d106c9cafd0f1000','running','evaluating',1.79579655513771963126e+09);
INSERT INTO "events" VALUES(36,'d106c9cafd0f1000','completed',NULL,1.79579655615579104419e+09);
INSERT INTO "events" VALUES(37,'4f1625969b2f1603','queued',NULL,1.79579655637736701964e+09);
INSERT INTO "events" VALUES(38,'4f1625969b2f1603','running','merging',1.79579655639663815502e+09);
INSERT INTO "events" VALUES(39,'4f1625969b2f1603','running','evaluating',1.79579655844103336335e+09);
INSERT INTO "events" VALUES(40,'3066aded147b0c22','queued',NULL,1.79579655857897090912e+09);
INSERT INTO "events" VALUES(41,'b7e6360acd87bf3e','queued',NULL,1.79579655860121583941e+09);
CREATE TABLE forgotten (job_id TEXT PRIMARY KEY);
CREATE TABLE "jobs" (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL,
    request TEXT NOT NULL,
    run TEXT NOT NULL,
    step INTEGER,
    weights TEXT NOT NULL,
    profile TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    not_before REAL NOT NULL DEFAULT 0,
    started_at REAL,
    completed_at REAL,
    pin TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    results TEXT,
    superseded_by TEXT,
    attempts_before INTEGER NOT NULL DEFAULT 0,
    alike TEXT
, again TEXT NOT NULL DEFAULT '', settings TEXT, hidden TEXT, was_hidden TEXT, facts TEXT);
INSERT INTO "jobs" VALUES(1,'a0a8f751ca5c57ba','0b82de492eebc8aac773a779afee4b15','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "a393087d3108e808", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/models/base", "run": "output", "run_id": "7aa2c510f57bdfb1", "step": 0, "stamps": {"model.safetensors": [84, 1795796527107052734]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','7aa2c510f57bdfb1',0,'model','script','completed',NULL,1.79579652718102741239e+09,1.79579652718102741239e+09,0.0,1.79579652719078755379e+09,1.79579652906512618072e+09,NULL,1,0,NULL,'{DIRECTORY}/work/jobs/a0a8f751ca5c57ba/1/output/results.json',NULL,0,'71bc78fa39eb7cd27eb48f51dec9e110','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'26811812f295464f','bc6cdc431e863eb3b6871d46a3a0b5d5','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "6b79d6bea888d27f", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-100", "run": "output", "run_id": "7aa2c510f57bdfb1", "step": 100, "stamps": {"model.safetensors": [84, 1795796529183350562]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','7aa2c510f57bdfb1',100,'model','script','completed',NULL,1.79579652922071790694e+09,1.79579652922071790694e+09,0.0,1.79579652925413274762e+09,1.7957965316609950066e+09,'{DIRECTORY}/root/a/output/_unshard/pins/6e2f9221a3aeb106/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/26811812f295464f/1/output/results.json',NULL,0,'4ba9657c2a72a022fa4770c89a12b0ad','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(3,'19b764cc376c8a0d','2bf77f88fbc0c237bb8779607e1a3e40','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "b90f58c209826a13", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "run": "output", "run_id": "7aa2c510f57bdfb1", "step": 200, "stamps": {"model.safetensors": [84, 1795796531783350590]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','7aa2c510f57bdfb1',200,'model','script','completed',NULL,1.79579653180894875524e+09,1.79579653180894875524e+09,0.0,1.7957965318250486851e+09,1.79579653386527752874e+09,'{DIRECTORY}/root/a/output/_unshard/pins/c3d37761225753c8/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/19b764cc376c8a0d/1/output/results.json',NULL,0,'4baf2835b59f735a293297266aeeaf13','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(4,'bc558784354eb51d','51eb18c033593af478b67992910ea41b','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "a749046d28b87515", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-100", "run": "output", "run_id": "b36a510451b1d8cf", "step": 100, "stamps": {"model.safetensors": [84, 1795796534019350613]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','b36a510451b1d8cf',100,'model','script','completed',NULL,1.79579653404235863685e+09,1.79579653404235863685e+09,0.0,1.79579653404591226581e+09,1.79579653594257640839e+09,'{DIRECTORY}/root/b/output/_unshard/pins/58e5eee402fa73b3/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/bc558784354eb51d/1/output/results.json',NULL,0,'823b1988a9005daafda8208f4b1aa049','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(5,'76067061a9259582','16c93af32937f61ef79a0a0b5c55202f','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "353d5e5096c71ba7", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-200", "run": "output", "run_id": "b36a510451b1d8cf", "step": 200, "stamps": {"model.safetensors": [84, 1795796536039350635]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','b36a510451b1d8cf',200,'model','script','completed',NULL,1.79579653605336236952e+09,1.79579653605336236952e+09,0.0,1.79579653606153798106e+09,1.79579653938193035123e+09,'{DIRECTORY}/root/b/output/_unshard/pins/7f91ccda08d36ea5/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/76067061a9259582/1/output/results.json',NULL,0,'8f2aecb35f7a007eb7a17b92954925b1','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'8920cb6a8c50d9e3','756b0e51f389c0054d0a87238679d08f','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "b90f58c209826a13", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "run": "output", "run_id": "7aa2c510f57bdfb1", "step": 200, "stamps": {"model.safetensors": [84, 1795796531783350590]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": 20, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','7aa2c510f57bdfb1',200,'model','script','completed',NULL,1.7957965395411472321e+09,1.7957965395411472321e+09,0.0,1.79579653957782626148e+09,1.79579654386106014256e+09,'{DIRECTORY}/root/a/output/_unshard/pins/4eb919e323c71083/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/8920cb6a8c50d9e3/1/output/results.json',NULL,0,'895a867d90255a7416f0b439a092eb95','','{"arguments": {"limit": 20}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'16066ea4b27b828a','d2ea3e4c261271c87ec96341268116ee','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "92f9868bc51229ad", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/c/x/checkpoint-5", "run": "exp", "run_id": "827cd1cb40cc5639", "step": 5, "stamps": {"model.safetensors": [84, 1795796543979350719]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','827cd1cb40cc5639',5,'model','script','completed',NULL,1.79579654399433755879e+09,1.79579654399433755879e+09,0.0,1.79579654399750542645e+09,1.795796549799939394e+09,'{DIRECTORY}/root/c/x/_unshard/pins/75db2d61d8a6c23e/checkpoint-5',1,0,NULL,'{DIRECTORY}/work/jobs/16066ea4b27b828a/1/output/results.json',NULL,0,'9cf37404b63709a51c6a24ad33287db6','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'28f1ed798e15133f','2290f79d57ad040e58bcc49be5830634','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "c4f89ffd503fd6ab", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/models/merged", "run": "hand", "run_id": "9a40fa578710cc70", "step": 7, "stamps": {"model.safetensors": [84, 1795796549927350782]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','9a40fa578710cc70',7,'model','script','completed',NULL,1.79579654998128175735e+09,1.79579654998128175735e+09,0.0,1.79579654999251866337e+09,1.79579655267668128015e+09,'{DIRECTORY}/root/models/_unshard/pins/70b8ed8ae75fe011/merged',1,0,NULL,'{DIRECTORY}/work/jobs/28f1ed798e15133f/1/output/results.json',NULL,0,'deb8739758a9d9951dab145c633e604f','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(9,'d106c9cafd0f1000','b0592f6a24f9aff15dd61022991ec0f0','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "414069aed4186ca5", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/models/alone", "run": "alone", "run_id": "e2515d677834fb2e", "step": null, "stamps": {"model.safetensors": [84, 1795796552819350813]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','e2515d677834fb2e',NULL,'model','script','completed',NULL,1.79579655282684111598e+09,1.79579655282684111598e+09,0.0,1.79579655284131550784e+09,1.79579655615578627587e+09,'{DIRECTORY}/root/models/_unshard/pins/8f7f5653c5477e89/alone',1,0,NULL,'{DIRECTORY}/work/jobs/d106c9cafd0f1000/1/output/results.json',NULL,0,'6641b0a3d94150baaaaabcdbb9aa5d6a','','{"arguments": {}, "basis": "", "evaluator": null, "revision": ""}',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(10,'4f1625969b2f1603','77dc7d8e4dbf4082da4243ae609ea035','{"profile": "script", "tasks": ["waits"], "weights": "model", "fingerprint": "e1c9cbd5768b6823", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-300", "run": "output", "run_id": "7aa2c510f57bdfb1", "step": 300, "stamps": {"model.safetensors": [84, 1795796556331350850]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','7aa2c510f57bdfb1',300,'model','script','running','evaluating',1.79579655637736701964e+09,1.79579655637736701964e+09,0.0,1.79579655639663815502e+09,NULL,'{DIRECTORY}/root/a/output/_unshard/pins/6ac17be890e66dbe/checkpoint-300',1,0,NULL,NULL,NULL,0,'f1dc650076843799a598a022e43df102','',NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(11,'3066aded147b0c22','05fddf8a5616d50b84ad2f7255d2a1bc','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "0d3df026c5bb0895", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-300", "run": "output", "run_id": "b36a510451b1d8cf", "step": 300, "stamps": {"model.safetensors": [84, 1795796558555350874]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','b36a510451b1d8cf',300,'model','script','queued',NULL,1.79579655857897090912e+09,1.79579655857897090912e+09,0.0,NULL,NULL,'{DIRECTORY}/root/b/output/_unshard/pins/b2488a96518a602e/checkpoint-300',0,0,NULL,NULL,NULL,0,'10143eb14a3b6bd8f5f5c369cbdbde00','11',NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(12,'b7e6360acd87bf3e','05fddf8a5616d50b84ad2f7255d2a1bc','{"profile": "script", "tasks": ["score"], "weights": "model", "fingerprint": "0d3df026c5bb0895", "again": "", "directory": "", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-300", "run": "other", "run_id": "b36a510451b1d8cf", "step": 300, "stamps": {"model.safetensors": [84, 1795796558555350874]}, "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null, "apply_chat_template": null, "system_instruction": null, "fewshot_as_multiturn": null, "max_batch_size": null, "metadata": {}}','b36a510451b1d8cf',300,'model','script','queued',NULL,1.79579655860121583941e+09,1.79579655860121583941e+09,0.0,NULL,NULL,'{DIRECTORY}/root/b/output/_unshard/pins/b2488a96518a602e/checkpoint-300',0,0,NULL,NULL,NULL,0,'10143eb14a3b6bd8f5f5c369cbdbde00','',NULL,NULL,NULL,NULL);
CREATE TABLE pinned_runs (run TEXT PRIMARY KEY);
INSERT INTO "pinned_runs" VALUES('{DIRECTORY}/root/a/output');
INSERT INTO "pinned_runs" VALUES('{DIRECTORY}/root/b/output');
INSERT INTO "pinned_runs" VALUES('{DIRECTORY}/root/c/x');
INSERT INTO "pinned_runs" VALUES('{DIRECTORY}/root/models');
CREATE TABLE results (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    metric TEXT NOT NULL,
    value REAL NOT NULL,
    stderr REAL, higher_is_better INTEGER,
    PRIMARY KEY (job_id, metric)
);
INSERT INTO "results" VALUES('a0a8f751ca5c57ba','score/acc',0.0,0.125,NULL);
INSERT INTO "results" VALUES('26811812f295464f','score/acc',0.1,0.125,NULL);
INSERT INTO "results" VALUES('19b764cc376c8a0d','score/acc',0.2,0.125,NULL);
INSERT INTO "results" VALUES('bc558784354eb51d','score/acc',0.1,0.125,NULL);
INSERT INTO "results" VALUES('76067061a9259582','score/acc',0.2,0.125,NULL);
INSERT INTO "results" VALUES('8920cb6a8c50d9e3','score/acc',0.7,0.125,NULL);
INSERT INTO "results" VALUES('16066ea4b27b828a','score/acc',0.005,0.125,NULL);
INSERT INTO "results" VALUES('28f1ed798e15133f','score/acc',0.007,0.125,NULL);
INSERT INTO "results" VALUES('d106c9cafd0f1000','score/acc',0.0,0.125,NULL);
CREATE TABLE run_names (name TEXT NOT NULL, run TEXT NOT NULL, PRIMARY KEY (name, run));
INSERT INTO "run_names" VALUES('other','b36a510451b1d8cf');
INSERT INTO "run_names" VALUES('output','b36a510451b1d8cf');
INSERT INTO "run_names" VALUES('output','7aa2c510f57bdfb1');
INSERT INTO "run_names" VALUES('alone','e2515d677834fb2e');
INSERT INTO "run_names" VALUES('hand','9a40fa578710cc70');
INSERT INTO "run_names" VALUES('exp','827cd1cb40cc5639');
CREATE TABLE runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    directory TEXT NOT NULL,
    label TEXT NOT NULL,
    place TEXT NOT NULL,
    is_there INTEGER NOT NULL DEFAULT 1,
    is_written INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "runs" VALUES(1,'b36a510451b1d8cf','other','{DIRECTORY}/root/b/output','other','other',1,0);
INSERT INTO "runs" VALUES(2,'7aa2c510f57bdfb1','output','{DIRECTORY}/root/a/output','output','output',1,0);
INSERT INTO "runs" VALUES(3,'e2515d677834fb2e','alone','{DIRECTORY}/root/models/alone','alone','alone',1,0);
INSERT INTO "runs" VALUES(4,'9a40fa578710cc70','hand','','hand','hand',1,0);
INSERT INTO "runs" VALUES(5,'827cd1cb40cc5639','exp','{DIRECTORY}/root/c/x','exp','exp',1,0);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job_id) WHERE ended_at IS NULL;
CREATE INDEX jobs_by_status ON jobs (status, queued_at, number);
CREATE INDEX jobs_by_step ON jobs (run, step);
CREATE INDEX jobs_by_pin ON jobs (pin);
CREATE INDEX jobs_alike ON jobs (alike);
CREATE INDEX jobs_of_status ON jobs (status, number);
CREATE INDEX jobs_of_runs ON jobs (run, status, step);
CREATE VIEW run_calls AS SELECT id AS text, id AS run, 1 AS rank FROM runs UNION ALL
    SELECT label, id, 1 FROM runs UNION ALL SELECT directory, id, 1 FROM runs WHERE is_there
    UNION ALL SELECT name, run, 2 FROM run_names;
CREATE INDEX runs_by_name ON runs (name);
CREATE INDEX runs_by_directory ON runs (directory);
CREATE INDEX runs_by_label ON runs (label);
CREATE UNIQUE INDEX jobs_by_key ON jobs (key, again);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',41);
INSERT INTO "sqlite_sequence" VALUES('jobs',12);
INSERT INTO "sqlite_sequence" VALUES('runs',5);
COMMIT;
PRAGMA user_version = 5;
PRAGMA application_id = 181618240;
