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
CREATE TABLE deliveries (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job_id TEXT NOT NULL, body TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0, due_at REAL NOT NULL);
INSERT INTO "deliveries" VALUES(1,'40301ca9b8e5f563','a0a8f751ca5c57ba','{"delivery": "40301ca9b8e5f563", "job": "a0a8f751ca5c57ba", "status": "completed", "run": "output", "step": 0, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/models/base", "completed_at": 1795796529.0651262, "error": null, "metrics": {"score/acc": 0.0}, "stderr": {"score/acc": 0.125}}',3,1.79579656479270291331e+09);
INSERT INTO "deliveries" VALUES(2,'94a9d3db1c193713','26811812f295464f','{"delivery": "94a9d3db1c193713", "job": "26811812f295464f", "status": "completed", "run": "output", "step": 100, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-100", "completed_at": 1795796531.660995, "error": null, "metrics": {"score/acc": 0.1}, "stderr": {"score/acc": 0.125}}',3,1.7957965673116505146e+09);
INSERT INTO "deliveries" VALUES(3,'94f7ec601e5f34a4','19b764cc376c8a0d','{"delivery": "94f7ec601e5f34a4", "job": "19b764cc376c8a0d", "status": "completed", "run": "output", "step": 200, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "completed_at": 1795796533.8652775, "error": null, "metrics": {"score/acc": 0.2}, "stderr": {"score/acc": 0.125}}',3,1.79579656966247653963e+09);
INSERT INTO "deliveries" VALUES(4,'fc77eefc06950bbb','bc558784354eb51d','{"delivery": "fc77eefc06950bbb", "job": "bc558784354eb51d", "status": "completed", "run": "output", "step": 100, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-100", "completed_at": 1795796535.9425764, "error": null, "metrics": {"score/acc": 0.1}, "stderr": {"score/acc": 0.125}}',3,1.7957965715059125423e+09);
INSERT INTO "deliveries" VALUES(5,'e96e16cb81343236','76067061a9259582','{"delivery": "e96e16cb81343236", "job": "76067061a9259582", "status": "completed", "run": "output", "step": 200, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-200", "completed_at": 1795796539.3819304, "error": null, "metrics": {"score/acc": 0.2}, "stderr": {"score/acc": 0.125}}',3,1.79579657524428534503e+09);
INSERT INTO "deliveries" VALUES(6,'6265e886e7946608','8920cb6a8c50d9e3','{"delivery": "6265e886e7946608", "job": "8920cb6a8c50d9e3", "status": "completed", "run": "output", "step": 200, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "completed_at": 1795796543.8610601, "error": null, "metrics": {"score/acc": 0.7}, "stderr": {"score/acc": 0.125}}',2,1.79579655922445726389e+09);
INSERT INTO "deliveries" VALUES(7,'827084d5e8cfe551','16066ea4b27b828a','{"delivery": "827084d5e8cfe551", "job": "16066ea4b27b828a", "status": "completed", "run": "exp", "step": 5, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/c/x/checkpoint-5", "completed_at": 1795796549.7999394, "error": null, "metrics": {"score/acc": 0.005}, "stderr": {"score/acc": 0.125}}',2,1.79579656550076150901e+09);
INSERT INTO "deliveries" VALUES(8,'af7f1bfcb77dab0a','28f1ed798e15133f','{"delivery": "af7f1bfcb77dab0a", "job": "28f1ed798e15133f", "status": "completed", "run": "hand", "step": 7, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/models/merged", "completed_at": 1795796552.6766813, "error": null, "metrics": {"score/acc": 0.007}, "stderr": {"score/acc": 0.125}}',2,1.79579656815505194662e+09);
INSERT INTO "deliveries" VALUES(9,'a6c495ebc20afbb2','d106c9cafd0f1000','{"delivery": "a6c495ebc20afbb2", "job": "d106c9cafd0f1000", "status": "completed", "run": "alone", "step": null, "weights": "model", "profile": "script", "tasks": ["score"], "checkpoint": "{DIRECTORY}/root/models/alone", "completed_at": 1795796556.1557863, "error": null, "metrics": {"score/acc": 0.0}, "stderr": {"score/acc": 0.125}}',1,1.79579656147233581537e+09);
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
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL UNIQUE,
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
);
INSERT INTO "jobs" VALUES(1,'a0a8f751ca5c57ba','0bfa51695c9332cdf5c289a6fcd03d43','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796527107052734]}, "tasks": ["score"], "step": 0, "run": "output", "checkpoint": "{DIRECTORY}/root/models/base", "profile": "script", "fingerprint": "a393087d3108e808", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',0,'model','script','completed',NULL,1.79579652718102741239e+09,1.79579652718102741239e+09,0.0,1.79579652719078755379e+09,1.79579652906512618072e+09,NULL,1,0,NULL,'{DIRECTORY}/work/jobs/a0a8f751ca5c57ba/1/output/results.json',NULL,0,'0f63b7f5af05963a25cba92fd160c1a1');
INSERT INTO "jobs" VALUES(2,'26811812f295464f','cb8bac11fd2d065146fc89f83b6ec1a4','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796529183350562]}, "tasks": ["score"], "step": 100, "run": "output", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-100", "profile": "script", "fingerprint": "6b79d6bea888d27f", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',100,'model','script','completed',NULL,1.79579652922071790694e+09,1.79579652922071790694e+09,0.0,1.79579652925413274762e+09,1.7957965316609950066e+09,'{DIRECTORY}/root/a/output/_unshard/pins/6e2f9221a3aeb106/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/26811812f295464f/1/output/results.json',NULL,0,'fdf98d5261ac7434a5367ed5f0a62dca');
INSERT INTO "jobs" VALUES(3,'19b764cc376c8a0d','053aad40146c730a2929a07bd65e078e','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796531783350590]}, "tasks": ["score"], "step": 200, "run": "output", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "profile": "script", "fingerprint": "b90f58c209826a13", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',200,'model','script','completed',NULL,1.79579653180894875524e+09,1.79579653180894875524e+09,0.0,1.7957965318250486851e+09,1.79579653386527752874e+09,'{DIRECTORY}/root/a/output/_unshard/pins/c3d37761225753c8/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/19b764cc376c8a0d/1/output/results.json',NULL,0,'97601302364a4b21c7e65ccdd39afc15');
INSERT INTO "jobs" VALUES(4,'bc558784354eb51d','d3723c157f82d87b97ddc71f207cc2ab','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796534019350613]}, "tasks": ["score"], "step": 100, "run": "output", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-100", "profile": "script", "fingerprint": "a749046d28b87515", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',100,'model','script','completed',NULL,1.79579653404235863685e+09,1.79579653404235863685e+09,0.0,1.79579653404591226581e+09,1.79579653594257640839e+09,'{DIRECTORY}/root/b/output/_unshard/pins/58e5eee402fa73b3/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/bc558784354eb51d/1/output/results.json',NULL,0,'fdf98d5261ac7434a5367ed5f0a62dca');
INSERT INTO "jobs" VALUES(5,'76067061a9259582','2eed2b46dca79f2ee7f9b376c3d538de','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796536039350635]}, "tasks": ["score"], "step": 200, "run": "output", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-200", "profile": "script", "fingerprint": "353d5e5096c71ba7", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',200,'model','script','completed',NULL,1.79579653605336236952e+09,1.79579653605336236952e+09,0.0,1.79579653606153798106e+09,1.79579653938193035123e+09,'{DIRECTORY}/root/b/output/_unshard/pins/7f91ccda08d36ea5/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/76067061a9259582/1/output/results.json',NULL,0,'97601302364a4b21c7e65ccdd39afc15');
INSERT INTO "jobs" VALUES(6,'8920cb6a8c50d9e3','158f0a64cfcb1dc8ea028daab2c8254a','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796531783350590]}, "tasks": ["score"], "step": 200, "run": "output", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-200", "profile": "script", "fingerprint": "b90f58c209826a13", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": 20, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',200,'model','script','completed',NULL,1.7957965395411472321e+09,1.7957965395411472321e+09,0.0,1.79579653957782626148e+09,1.79579654386106014256e+09,'{DIRECTORY}/root/a/output/_unshard/pins/4eb919e323c71083/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/8920cb6a8c50d9e3/1/output/results.json',NULL,0,'6e264114643c9465fe15accdd41ce5e3');
INSERT INTO "jobs" VALUES(7,'16066ea4b27b828a','889698b022155132c6ad7b7bb703e199','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796543979350719]}, "tasks": ["score"], "step": 5, "run": "exp", "checkpoint": "{DIRECTORY}/root/c/x/checkpoint-5", "profile": "script", "fingerprint": "92f9868bc51229ad", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','exp',5,'model','script','completed',NULL,1.79579654399433755879e+09,1.79579654399433755879e+09,0.0,1.79579654399750542645e+09,1.795796549799939394e+09,'{DIRECTORY}/root/c/x/_unshard/pins/75db2d61d8a6c23e/checkpoint-5',1,0,NULL,'{DIRECTORY}/work/jobs/16066ea4b27b828a/1/output/results.json',NULL,0,'bd3c9f4a98298e5f955b0b2e4996d46b');
INSERT INTO "jobs" VALUES(8,'28f1ed798e15133f','23460b270021ef1c5b05d1ebea8e0368','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796549927350782]}, "tasks": ["score"], "step": 7, "run": "hand", "checkpoint": "{DIRECTORY}/root/models/merged", "profile": "script", "fingerprint": "c4f89ffd503fd6ab", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','hand',7,'model','script','completed',NULL,1.79579654998128175735e+09,1.79579654998128175735e+09,0.0,1.79579654999251866337e+09,1.79579655267668128015e+09,'{DIRECTORY}/root/models/_unshard/pins/70b8ed8ae75fe011/merged',1,0,NULL,'{DIRECTORY}/work/jobs/28f1ed798e15133f/1/output/results.json',NULL,0,'89f0855ec7a0f570d7fc6dc6f098baa3');
INSERT INTO "jobs" VALUES(9,'d106c9cafd0f1000','ce7966f5df92e3f2869d24490e088e57','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796552819350813]}, "tasks": ["score"], "step": null, "run": "alone", "checkpoint": "{DIRECTORY}/root/models/alone", "profile": "script", "fingerprint": "414069aed4186ca5", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','alone',NULL,'model','script','completed',NULL,1.79579655282684111598e+09,1.79579655282684111598e+09,0.0,1.79579655284131550784e+09,1.79579655615578627587e+09,'{DIRECTORY}/root/models/_unshard/pins/8f7f5653c5477e89/alone',1,0,NULL,'{DIRECTORY}/work/jobs/d106c9cafd0f1000/1/output/results.json',NULL,0,'aeab2a48b72065e38003f26d6863e6d2');
INSERT INTO "jobs" VALUES(10,'4f1625969b2f1603','b76073640a9bdc0e22b076ada3e1fd9d','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796556331350850]}, "tasks": ["waits"], "step": 300, "run": "output", "checkpoint": "{DIRECTORY}/root/a/output/checkpoint-300", "profile": "script", "fingerprint": "e1c9cbd5768b6823", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',300,'model','script','running','evaluating',1.79579655637736701964e+09,1.79579655637736701964e+09,0.0,1.79579655639663815502e+09,NULL,'{DIRECTORY}/root/a/output/_unshard/pins/6ac17be890e66dbe/checkpoint-300',1,0,NULL,NULL,NULL,0,'99275b3f8ce38385d16418ed29874f09');
INSERT INTO "jobs" VALUES(11,'3066aded147b0c22','44b606f3c40cf8e019a0b82ccc282b15','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796558555350874]}, "tasks": ["score"], "step": 300, "run": "output", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-300", "profile": "script", "fingerprint": "0d3df026c5bb0895", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','output',300,'model','script','queued',NULL,1.79579655857897090912e+09,1.79579655857897090912e+09,0.0,NULL,NULL,'{DIRECTORY}/root/b/output/_unshard/pins/b2488a96518a602e/checkpoint-300',0,0,NULL,NULL,NULL,0,'a6ca5456e0cd6a60bf0895af311d8e30');
INSERT INTO "jobs" VALUES(12,'b7e6360acd87bf3e','76560290a42378a32577995b62e5f6b3','{"weights": "model", "stamps": {"model.safetensors": [84, 1795796558555350874]}, "tasks": ["score"], "step": 300, "run": "other", "checkpoint": "{DIRECTORY}/root/b/output/checkpoint-300", "profile": "script", "fingerprint": "0d3df026c5bb0895", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','other',300,'model','script','queued',NULL,1.79579655860121583941e+09,1.79579655860121583941e+09,0.0,NULL,NULL,'{DIRECTORY}/root/b/output/_unshard/pins/b2488a96518a602e/checkpoint-300',0,0,NULL,NULL,NULL,0,'d064f52e2d1a7073588780ce12eaf20c');
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
CREATE INDEX jobs_by_status ON jobs (status, queued_at, number);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job_id) WHERE ended_at IS NULL;
CREATE INDEX jobs_by_step ON jobs (run, step);
CREATE INDEX jobs_by_pin ON jobs (pin);
CREATE INDEX jobs_alike ON jobs (alike);
CREATE INDEX jobs_of_status ON jobs (status, number);
CREATE INDEX jobs_of_runs ON jobs (run, status, step);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',12);
INSERT INTO "sqlite_sequence" VALUES('events',41);
INSERT INTO "sqlite_sequence" VALUES('deliveries',9);
COMMIT;
PRAGMA application_id = 181618240;
PRAGMA user_version = 4;
